"""Everything that only a GPU can show, in one command for the minutes that one is lent: see `__main__`."""

from benchmarks.gpu.standalone import prepare

prepare()
