#!/usr/bin/env bash
# What the tests need beyond Python: SLURM, munge and OpenSSH (launchers), iproute2 (cluster), Chromium (pages), strace and
# Prometheus (service), binutils (image).
# Quick when nothing is missing; installs with apt as root on Debian-like systems; elsewhere lists what is missing.
set -euo pipefail
declare -A package_of=(
  [slurmctld]=slurmctld [slurmd]=slurmd [srun]=slurm-client [munged]=munge
  [ssh]=openssh-client [ssh-keygen]=openssh-client [sshd]=openssh-server
  [ip]=iproute2 [tc]=iproute2 [chromium]=chromium [strace]=strace [strip]=binutils
  [prometheus]=prometheus
)
PATH="$PATH:/usr/sbin:/sbin"
missing=()
for program in "${!package_of[@]}"; do
  command -v "$program" >/dev/null 2>&1 || missing+=("${package_of[$program]}")
done
[ ${#missing[@]} -eq 0 ] && exit 0
mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
  echo "tests need these packages, install them first: ${missing[*]}" >&2
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# policy-rc.d: the tests start what they need, with their settings.
if [ ! -e /usr/sbin/policy-rc.d ]; then
  trap 'rm -f /usr/sbin/policy-rc.d' EXIT
  printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d && chmod +x /usr/sbin/policy-rc.d
fi
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
