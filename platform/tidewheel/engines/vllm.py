"""vLLM (https://github.com/vllm-project/vllm) as the engine, in an environment of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from tidewheel.engines import child
from tidewheel.engines.serving.base import Decoding, EngineUse
from tidewheel.engines.serving.process import ProcessEngine
from tidewheel.errors import ConfigError
from tidewheel.models.family import Model
from tidewheel.versions import Version


class Vllm(ProcessEngine):
    """Sample with vLLM. Its log-probabilities are near those of training, not equal: `gap` shows how near."""

    VERSION: ClassVar[Version | None] = Version("engine_vllm")
    PROGRAM: ClassVar[Path] = Path(child.__path__[0], "vllm_engine.py")
    PYTHON: ClassVar[str] = "TIDEWHEEL_VLLM_PYTHON"
    INSTALL: ClassVar[str] = ("make an environment with vLLM: `bash cluster/vllm_environment.sh /opt/vllm`, or vLLM's "
                              "own installation guide")
    UNDECISIVE: ClassVar[tuple[str, ...]] = (*ProcessEngine.UNDECISIVE, "cache_gib", "memory_fraction")

    cache_gib: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Memory for keys and values, GiB. 0: 1 on a CPU; on a GPU what `memory_fraction` leaves."""
    memory_fraction: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that vLLM takes."""
    compiled: bool = False
    """Compile the model and capture CUDA graphs: faster steps on a GPU, and minutes to start."""
    prefix_caching: bool = True
    """Keep keys and values of prompts, which the answers of a group and the turns of an answer share."""

    def problem(self, model: Model, decoding: Decoding, gpus: float) -> str:
        """See `Engine`."""
        if decoding.temperature != 1 and (decoding.top_k or decoding.top_p < 1):
            return (f"vLLM has no log-probabilities over the whole vocabulary at temperature {decoding.temperature:g} "
                    "with top_k or top_p: it has them with all logits at temperature 1, or with neither; nearest legal "
                    "choice: temperature 1")
        if gpus > 1 and gpus != int(gpus):
            return f"vLLM uses whole GPUs, but generators.gpus is {gpus:g}; nearest legal choice: {int(gpus)}"
        try:
            model.hugging_face_names()
            model.to_hugging_face(1, eos=None, dtype="float32")
        except ConfigError as error:
            return f"vLLM reads models in Hugging Face's format, and this one has none: {error.what}"
        return ""

    def load_settings(self, use: EngineUse) -> dict[str, object]:
        """See `ProcessEngine`."""
        decoding = use.decoding
        arguments: dict[str, Any] = {
            "dtype": "bfloat16" if decoding.precision == "bf16" else "float32", "load_format": "safetensors",
            "max_model_len": use.model.max_sequence_length, "skip_tokenizer_init": True, "generation_config": "vllm",
            "enforce_eager": not self.compiled, "enable_prefix_caching": self.prefix_caching, "seed": 0,
            "disable_log_stats": True,
            # "raw" has the whole vocabulary but no temperature; "processed" has it, but not what top_k leaves out
            "logprobs_mode": "raw_logprobs" if decoding.temperature == 1 else "processed_logprobs"}
        if use.device == "cpu" or self.cache_gib:
            arguments["kv_cache_memory_bytes"] = int((self.cache_gib or 1) * (1 << 30))
        else:
            arguments["gpu_memory_utilization"] = self.memory_fraction
        if use.gpus > 1:
            arguments["tensor_parallel_size"] = int(use.gpus)
        return {"arguments": arguments, "decoding": {
            "temperature": decoding.temperature, "top_k": decoding.top_k, "top_p": decoding.top_p,
            "stop_token_ids": sorted(decoding.stop)}}

    def variables(self, use: EngineUse) -> dict[str, str]:
        """See `ProcessEngine`. Threads must not wait busily: generators share their nodes."""
        values = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
                  "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        if use.device == "cpu":
            values |= {"OMP_NUM_THREADS": str(max(1, int(use.cpus))), "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                       "KMP_BLOCKTIME": "0", "OMP_WAIT_POLICY": "PASSIVE"}
        return values
