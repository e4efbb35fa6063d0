from __future__ import annotations

import os
import sys
from pathlib import Path

from ray import cloudpickle

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).parents[2] / "core" / "cluster"))
import cluster_workers  # of the tests of rl_core.cluster, which is not on the import path

cloudpickle.register_pickle_by_value(cluster_workers)
