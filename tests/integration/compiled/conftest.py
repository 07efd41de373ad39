"""Programs for devices that are not here: `make test-compiled-cuda` and `make test-compiled-tpu`.

Without a compiler for one of them there is nothing to collect.
"""

from benchmarks.compiled import _devices

collect_ignore_glob = [] if _devices.available() else ["test_*.py"]
