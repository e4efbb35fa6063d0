"""What a backend is built from: the one module of rl-core that authors of policies and generation engines import from.

A backend consists of a config model, a worker and a facade. The facade is what a run constructs. It starts one worker per rank,
in this process or on a cluster, and does what is the same for all backends: sharding, dispatch, timeouts, restarts. The package
`rl_backends_base` has facades, and workers that lack only the model. See docs/api/backend.md for the arguments of a facade, the
facts of a worker, and how weights arrive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_core.config.validator import section_from_keywords as section_from_keywords
from rl_core.data.batched_data_dict import BatchedDataDict as BatchedDataDict
from rl_core.data.generation_io import Completion as Completion
from rl_core.data.generation_io import LengthLimits as LengthLimits
from rl_core.data.generation_io import Prompt as Prompt
from rl_core.data.generation_io import PromptReader as PromptReader
from rl_core.data.generation_io import SampledRow as SampledRow
from rl_core.data.generation_io import end_token_ids as end_token_ids
from rl_core.data.generation_io import to_output as to_output
from rl_core.data.loaded_model import CLASSIFIER as CLASSIFIER
from rl_core.data.loaded_model import Head as Head
from rl_core.data.loaded_model import check_files as check_files
from rl_core.data.loaded_model import check_loaded as check_loaded
from rl_core.data.loaded_model import exact_attention as exact_attention
from rl_core.data.loaded_model import refuse_other_head as refuse_other_head
from rl_core.data.loaded_model import report_as_error as report_as_error
from rl_core.data.tokenizer import find_tokenizer as find_tokenizer
from rl_core.dispatch.rows import ROW_KEYS as ROW_KEYS
from rl_core.dispatch.rows import pad_rows_to_multiple as pad_rows_to_multiple
from rl_core.dispatch.rows import select_columns as select_columns
from rl_core.dispatch.text_generation import TextGeneration as TextGeneration
from rl_core.first_use import import_on_first_use
from rl_core.interfaces.policy import RefitManifest as RefitManifest
from rl_core.interfaces.worker import GenerationFacts as GenerationFacts
from rl_core.interfaces.worker import GenerationRequest as GenerationRequest
from rl_core.interfaces.worker import GenerationWorker as GenerationWorker
from rl_core.interfaces.worker import GlobalCounts as GlobalCounts
from rl_core.interfaces.worker import PolicyFacts as PolicyFacts
from rl_core.interfaces.worker import PolicyWorker as PolicyWorker
from rl_core.interfaces.worker import StepResult as StepResult
from rl_core.interfaces.worker_context import WorkerContext as WorkerContext
from rl_core.interfaces.worker_context import return_freed_memory as return_freed_memory
from rl_core.old_paths import NEW_NAMES
from rl_core.weights.adapters import LORA_A as LORA_A
from rl_core.weights.adapters import LORA_B as LORA_B
from rl_core.weights.adapters import LORA_SCALE as LORA_SCALE
from rl_core.weights.disk import file_digest as file_digest
from rl_core.weights.disk import resolve_below as resolve_below
from rl_core.weights.fingerprint import digest_of as digest_of
from rl_core.weights.fingerprint import natural_kind as natural_kind
from rl_core.weights.fingerprint import same_digests_on_every_replica as same_digests_on_every_replica
from rl_core.weights.fingerprint import tensor_digests as tensor_digests
from rl_core.weights.manifest import dtype_name as dtype_name
from rl_core.weights.manifest import dtype_of as dtype_of
from rl_core.weights.manifest import manifest_of as manifest_of
from rl_core.weights.manifest import manifest_to_send as manifest_to_send
from rl_core.weights.manifest import weights_of as weights_of
from rl_core.weights.receiver import NO_VERSION as NO_VERSION
from rl_core.weights.receiver import WeightReceiver as WeightReceiver
from rl_core.weights.receiver import WeightSink as WeightSink
from rl_core.weights.source import WeightSource as WeightSource

if TYPE_CHECKING:
    from rl_core.weights.disk import first_non_finite as first_non_finite
    from rl_core.weights.disk import refuse_non_finite_file as refuse_non_finite_file

# torch.distributed.checkpoint takes almost a second to import, and engines do not need it.
__getattr__ = import_on_first_use(__name__, moved=NEW_NAMES[__name__])
