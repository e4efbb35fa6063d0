"""The configuration that vLLM builds from our arguments on a GPU, whose platform is simulated; no kernel runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.full("it imports vLLM in a process of its own; test_arrivals.py checks the arguments by themselves"),
]


def configured(readable, section):
    program = Path(__file__).with_name("cuda_config.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, str(program), str(readable), json.dumps(section)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_replica_of_two_gpus_has_graphs_chunked_prefill_sleep_mode_and_the_number_of_rows_of_its_gpu(readable):
    found = configured(readable, {"vllm_cfg": {"tensor_parallel_size": 2, "sleep_level": 2}})
    assert found == {
        "device": "cuda",
        "max_num_seqs": 1024,
        "chunked_prefill": True,
        "cuda_graphs": "FULL_AND_PIECEWISE",
        "sleep_mode": True,
        "tensor_parallel": 2,
        "gpu_memory_utilization": 0.6,
        "executor": "MultiProcessExecutor",
    }
