from __future__ import annotations

import os
import sys
from pathlib import Path

from ray import cloudpickle

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).parent))
import cluster_workers  # next to this file, which is not on the import path

cloudpickle.register_pickle_by_value(cluster_workers)
