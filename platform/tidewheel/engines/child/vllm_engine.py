"""vLLM as an engine: `/opt/vllm/bin/python vllm_engine.py DESCRIPTOR`, in an environment that has vLLM.

vLLM runs in this process, with one group of sequences at a time. Its arguments are those of `vllm.LLM`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from answering import MISSING, UNSUPPORTED, Beat, Refused, serve


class Vllm:
    """vLLM with one model, whose weights change in place."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._decoding: dict[str, Any] = {}
        self._requests = 0

    def load(self, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Start vLLM with the weights in a folder, or load them into the vLLM that runs.

        Raises:
            Refused: vLLM is missing, or cannot serve the model.
        """
        try:
            import vllm
        except ImportError as error:
            raise Refused(MISSING, f"{type(error).__name__}: {error}") from error
        self._decoding = settings["decoding"]
        if self._llm is None:
            _check(vllm, folder)
            self._llm = vllm.LLM(model=folder, **settings["arguments"])
            # The first step compiles, for minutes on a busy machine, and gives no sign of life meanwhile.
            self.complete([{"tokens": [0], "most": 2, "seed": 0}], lambda: None)
        else:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
            if _is_cpu():
                self._llm.collective_rpc(_tie_again)
            self._llm.reset_prefix_cache()
        return {"about": f"vllm {vllm.__version__}"}

    def complete(self, prefixes: list[dict[str, Any]], beat: Beat) -> list[dict[str, Any]]:
        """Return a completion for each prefix, all of them in one batch."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self._llm.llm_engine
        order: dict[str, int] = {}
        for index, prefix in enumerate(prefixes):
            # `ignore_eos`: what ends a completion is what Tidewheel says, not what the model's files say
            params = SamplingParams(**self._decoding, max_tokens=prefix["most"], seed=prefix["seed"], logprobs=0,
                                    ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
            name = f"r{self._requests}"
            self._requests += 1
            engine.add_request(name, {"prompt_token_ids": prefix["tokens"]}, params)
            order[name] = index
        results: list[dict[str, Any]] = [{} for _ in prefixes]
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    [completion] = output.outputs
                    tokens = list(completion.token_ids)
                    values = [places[token].logprob for places, token in zip(completion.logprobs, tokens)]
                    results[order[output.request_id]] = {"tokens": tokens, "log_probabilities": values}
            beat()
        return results


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _tie_again(worker: Any) -> None:
    """Give a head that is tied to the embedding the weights that this has now.

    On a CPU such a head has a packed copy of them. `reload_weights` leaves the copy of the first version (vLLM 0.32.0
    prints "ParallelLMHead: Failed to load weights").
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    model = worker.get_model()
    if not getattr(model.config, "tie_word_embeddings", False):
        return
    modules = list(model.modules())
    heads = [module for module in modules if isinstance(module, ParallelLMHead)]
    tables = [module for module in modules if isinstance(module, VocabParallelEmbedding) and module not in heads]
    for head in heads:
        head.tie_weights(tables[0])
        head.quant_method.process_weights_after_loading(head)


def _check(vllm: Any, folder: str) -> None:
    """Raise Refused if vLLM has no such model, or no attention of this shape on a CPU."""
    from vllm.model_executor.models.registry import ModelRegistry

    config = json.loads(Path(folder, "config.json").read_text())
    [architecture] = config["architectures"]
    if architecture not in ModelRegistry.get_supported_archs():
        raise Refused(UNSUPPORTED, f"vLLM {vllm.__version__} has no {architecture}")
    if _is_cpu() and "num_attention_heads" in config:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        sizes = CPUAttentionBackend.get_supported_head_sizes()
        if size not in sizes:
            shown = ", ".join(map(str, sizes))
            raise Refused(UNSUPPORTED, f"vLLM {vllm.__version__} has no attention with heads of {size} on a CPU, only "
                                       f"of {shown}")


if __name__ == "__main__":
    serve(Vllm(), int(sys.argv[1]))
