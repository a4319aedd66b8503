# syntax=docker/dockerfile:1.7
# The service with Postgres support. Build: docker build -t tula .
# The base is pinned by version, not by digest: a digest has to be read from a registry, which the tests of this file do
# not reach. To pin by digest too: --build-arg BASE=python:3.12.11-slim-bookworm@sha256:...
ARG BASE=python:3.12.11-slim-bookworm

FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source
COPY pyproject.toml constraints.txt hatch_build.py README.md LICENSE ./
COPY client client
COPY agent agent
COPY service service
COPY migrations migrations
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends binutils && rm -rf /var/lib/apt/lists/*
# What is copied on has no pip, no tests, headers or stubs, and no debugging symbols; libraries that a wheel carries
# beside its modules (*.libs) were rewritten by its maker and stay as they are. Byte code last: nobody can write it later.
RUN python -m venv --without-pip /opt/tula \
    && python -m pip --python /opt/tula/bin/python install --no-compile --constraint constraints.txt '.[service,postgres]' \
    && find /opt/tula/lib -depth -type d \( -name tests -o -name include \) -exec rm -r {} + \
    && find /opt/tula/lib -type f \( -name '*.pyi' -o -name '*.pxd' -o -name '*.pyx' -o -name '*.a' \) -delete \
    && find /opt/tula/lib -type f -name '*.so' -not -path '*.libs/*' -exec strip --strip-debug {} + \
    && /opt/tula/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/tula/lib

FROM ${BASE}
LABEL org.opencontainers.image.title="Tula" org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 tula && useradd --uid 10001 --gid tula --no-create-home --shell /usr/sbin/nologin tula \
    && install --directory --owner=tula --group=tula /data
COPY --from=build /opt/tula /opt/tula
ENV PATH=/opt/tula/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 \
    TULA_HOST=0.0.0.0 TULA_PORT=8321 TULA_DATABASE=/data/tula.db
USER 10001:10001
WORKDIR /data
VOLUME ["/data"]
EXPOSE 8321
HEALTHCHECK --interval=15s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8321/readyz', timeout=4)"]
ENTRYPOINT ["python", "-m", "tula_service"]
CMD ["serve"]
