"""Programs of `python -m benchmarks.peers`, each run by the interpreter of one peer's environment.

`PROGRAM JOB ANSWER` reads a job as JSON and writes its answer as JSON. Lines that a reader of that tool's documents has
to write for the script stand between `# user` and `# end`; `lines` counts them.
"""
