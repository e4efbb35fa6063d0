"""Diagnoses of a model and its backends through their public interfaces, each a function with a named result."""

from rl_train.diagnostics.decoding import test_generation_consistency as test_generation_consistency
from rl_train.diagnostics.decoding import test_max_model_len_respected as test_max_model_len_respected
from rl_train.diagnostics.diagnosis import Diagnosis as Diagnosis
from rl_train.diagnostics.diagnosis import DiagnosisStatus as DiagnosisStatus
