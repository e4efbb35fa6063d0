"""Measure the throughput of file digests: the checkpoint digest against those of hashlib, over the same file in the page cache.

python benchmarks/checkpoint_digests.py --mib 512 --folder /dev/shm
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
import time
from pathlib import Path

import xxhash

DIGESTS = {"xxh3_128": xxhash.xxh3_128, "sha256": hashlib.sha256, "blake2b": hashlib.blake2b}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="size of the file")
    parser.add_argument("--folder", type=Path, help="folder of the test file; the temporary folder by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "weights"
        path.write_bytes(os.urandom(options.mib * 2**20))
        print(f"{'digest':10} {'GiB per CPU-second':>20}")
        for name, digest in DIGESTS.items():
            started = time.process_time()
            with path.open("rb", buffering=0) as file:
                hashlib.file_digest(file, digest)
            print(f"{name:10} {options.mib / 1024 / (time.process_time() - started):20.2f}")


if __name__ == "__main__":
    main()
