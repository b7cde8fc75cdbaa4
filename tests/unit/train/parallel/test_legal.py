"""Tests that illegal layouts are refused with the reason and the nearest legal value."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.config import build
from tidewheel.errors import ConfigError
from tidewheel.models.families import Llama
from tidewheel.models.families.mixtral import Mixtral
from tidewheel.train.config import TrainConfig
from tidewheel.train.parallel import legal
from tidewheel.train.parallel.building import reduces_always
from tidewheel.train.parallel.config import ParallelConfig
from tidewheel.train.parallel.mesh import Mesh, mesh_sizes

MIXTURE = ("model.kind=mixtral", "model.num_experts=8")
MODEL = Llama(dim=64, num_layers=4, num_heads=8, num_kv_heads=4, ffn_dim=192)


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        build(TrainConfig, {"elastic": {"max_workers": 16}}, overrides)
    return str(error.value)


@given(virtual=st.integers(1, 64), unit=st.integers(1, 8), replicate=st.integers(1, 4), least=st.integers(1, 16),
       most=st.integers(1, 64), context=st.integers(1, 2), expert=st.integers(1, 4))
def test_legal_sizes_are_all_numbers_that_share_the_work_evenly(virtual, unit, replicate, least, most, context, expert):
    sizes = legal.legal_sizes(virtual, least, most, unit=unit, replicate=replicate, context=context, expert=expert)
    possible = [size for size in range(least, most + 1) if size % unit == 0 and virtual % (size // unit) == 0
                and size // unit % replicate == 0 and size // unit // replicate * context % expert == 0]
    assert list(sizes) == possible


@given(virtual=st.integers(1, 64), unit=st.integers(1, 4), shard=st.integers(1, 6), context=st.integers(1, 2),
       expert=st.integers(1, 4))
def test_replica_groups_of_a_fixed_size_are_whole(virtual, unit, shard, context, expert):
    sizes = legal.legal_sizes(virtual, 1, 64, unit=unit, shard=shard, context=context, expert=expert)
    possible = [size for size in range(1, 65) if size % unit == 0 and virtual % (size // unit) == 0
                and size // unit % shard == 0 and shard * context % expert == 0]
    assert list(sizes) == possible


def test_the_number_of_replica_groups_follows_from_the_workers():
    config = ParallelConfig(data="zero3", shard=2, tensor=2)
    assert [mesh_sizes(config, world)["replicate"] for world in (4, 8, 12)] == [1, 2, 3]
    assert {mesh_sizes(config, world)["shard"] for world in (4, 8, 12)} == {2}
    assert config.group == 4
    assert ParallelConfig(data="zero3", replicate=2).group == 0


@given(st.sampled_from(["ddp", "zero1", "zero2", "zero3", "auto"]), st.sampled_from([1, 2, 4]),
       st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.integers(1, 8))
def test_the_mesh_has_all_ranks(data, replicate, tensor, pipeline, context, size):
    fully = data in ("zero2", "zero3", "auto")
    config = ParallelConfig(data=data, replicate=replicate if fully else 1, tensor=tensor, pipeline=pipeline,
                            context=context)
    world = config.unit * config.replicate * size
    sizes = mesh_sizes(config, world)
    total = 1
    for number in sizes.values():
        total *= number
    assert total == world
    assert sizes["replicate"] == (config.replicate if fully else size)


@pytest.mark.parametrize(("overrides", "says"), [
    (["parallel.data=ddp", "parallel.replicate=2"], "nearest legal choice: replicate 1, or data zero3"),
    (["parallel.data=zero1", "parallel.offload=true"], "nearest legal choice: zero2"),
    (["parallel.pipeline=2", "parallel.pipeline_schedule=zbv_zero_bubble", "compile=true"],
     "nearest legal choice: interleaved_1f1b, or compile false"),
    (["parallel.pipeline=2", "parallel.pipeline_schedule=zbv_zero_bubble", "parallel.data=zero3"],
     "nearest legal choice: data zero2"),
    (["parallel.pipeline=2", "parallel.pipeline_schedule=interleaved_zero_bubble",
      "memory.activation_checkpointing=selective"], "nearest legal choice: activation_checkpointing full"),
    (["parallel.pipeline=2", "parallel.reduce=micro_batch"], "nearest legal choice: step"),
    (["compression.kind=topk"], "nearest legal choice: parallel.data zero1, or ddp"),
    (["compression.kind=topk", "parallel.data=zero3"], "leaves that to FSDP2"),
    (["compression.kind=topk", "parallel.data=zero1", "parallel.tensor=2"], "nearest legal choice: tensor 1"),
    (["compression.kind=topk", "parallel.data=zero1", "parallel.pipeline=2"], "nearest legal choice: pipeline 1"),
    (["compression.kind=topk", "parallel.data=ddp", "parallel.context=2"], "nearest legal choice: context 1"),
    (["compression.kind=topk", "parallel.data=ddp", "precision=fp16"], "nearest legal choice: precision bf16"),
    (["compression.kind=topk", "parallel.data=ddp", "reproducible=true", "guards.recomputation={}"],
     "leave guards.recomputation out"),
    (["compression={kind: topk, densty: 0.1}", "parallel.data=ddp"], "did you mean 'density'"),
    (["compression.kind=top_k", "parallel.data=ddp"], "did you mean 'topk'"),
    (["parallel.async_tensor=true"], "nearest legal choice: async_tensor false, or tensor 2"),
    (["parallel.tensor=2", "parallel.async_tensor=true", "parallel.pipeline=2",
      "parallel.pipeline_schedule=interleaved_zero_bubble"], "nearest legal choice: interleaved_1f1b, or async_tensor"),
    (["parallel.tensor=2", "parallel.async_tensor=true", "precision=fp8"], "nearest legal choice: precision bf16"),
    (["parallel.tensor=2", "parallel.async_tensor=true", "memory.activation_checkpointing=selective",
      "memory.keep_products=[wo]"], "nearest legal choice: keep_products []"),
    (["parallel.tensor=2", "parallel.async_tensor=true", "reproducible=true"],
     "nearest legal choice: async_tensor false"),
    (["parallel.pipeline_stages=2"], "nearest legal choice: pipeline_stages 1"),
    (["parallel.pipeline=4", "elastic.min_workers=16"], "cannot run 2 micro-batches on a pipeline of 4"),
    (["parallel.pipeline=4", "parallel.pipeline_schedule=interleaved_1f1b", "batch.global_sequences=9",
      "batch.micro_sequences=1", "batch.virtual_ranks=1"], "nearest number that it can: 10"),
    (["parallel.data=ddp", "parallel.reduce=micro_batch"], "nearest legal choice: step"),
    (["parallel.tensors=2"], "did you mean 'tensor'"),
    (["parallel.replicate=3", "batch.virtual_ranks=4"], "replicate 3 does not divide batch.virtual_ranks 4; nearest"),
    (["parallel.replicate=4", "elastic.max_workers=2"], "nearest that is: 4"),
    (["parallel.shard=3", "batch.virtual_ranks=4"], "shard 3 does not divide batch.virtual_ranks 4; nearest"),
    (["parallel.shard=4", "elastic.max_workers=2"], "multiple of shard 4; nearest that is: 4"),
    (["parallel.shard=2", "parallel.replicate=2"], "nearest legal choice: replicate 1"),
    (["parallel.shard=2", "parallel.data=ddp"], "leave shard out, or data zero3"),
    (["parallel.shard=2", "parallel.reduce_dtype=bf16", "parallel.reduce=micro_batch"], "bf16 with shard 2"),
    (["parallel.tensor=2", "precision=fp8", "fp8={recipe: tensorwise, all_gather: true}"],
     "nearest legal choice: parallel.tensor 1, or fp8.all_gather false"),
    (["parallel.data=ddp", "precision=fp8", "fp8={recipe: tensorwise, all_gather: true}"],
     "not for data ddp; nearest legal choice: zero2"),
    (["parallel.context=2", "model.attention=varlen"], "nearest legal choice: attention flex"),
    (["elastic.min_workers=3", "elastic.max_workers=3"], "divides batch.virtual_ranks 4"),
    (["parallel.expert=2"], "model.kind llama has none; nearest legal choice: 1"),
    ([*MIXTURE, "parallel.expert=3", "batch.virtual_ranks=6", "batch.global_sequences=24"],
     "parallel.expert 3 does not divide model.num_experts 8; nearest that does: 2"),
    ([*MIXTURE, "parallel.expert=2", "parallel.data=ddp"], "nearest legal choice: expert 1, or data zero2"),
    ([*MIXTURE, "parallel.expert=8"], "no number of workers, which batch.virtual_ranks 4 must share evenly; nearest "
     "that does: 4"),
    ([*MIXTURE, "parallel.expert=4", "elastic.max_workers=2"], "a mesh of expert 4: it must be 1 times a number that "
     "divides batch.virtual_ranks 4, with a multiple of expert 4 in shard x context of each copy; nearest that is: 4"),
    ([*MIXTURE, "parallel.expert=2", "parallel.pipeline=2", "parallel.pipeline_schedule=zbv_zero_bubble"],
     "nearest legal choice: interleaved_1f1b"),
])
def test_an_illegal_configuration_is_refused(overrides: list[str], says: str):
    assert says in refused(*overrides)


@pytest.mark.parametrize(("parallel", "says"), [
    ({"tensor": 8}, "does not divide key and value heads, 4; nearest that does: 4"),
    ({"tensor": 3}, "does not divide key and value heads, 4; nearest that does: 2"),
    ({"pipeline": 7}, "more than the 6 pieces of the model (embedding, 4 layers, output); nearest legal choice: 6"),
    ({"pipeline": 4, "pipeline_schedule": "zbv_zero_bubble"}, "nearest legal choice: 3"),
])
def test_a_layout_that_does_not_divide_the_model_is_refused(parallel: dict[str, int], says: str):
    assert says in (legal.shape(ParallelConfig(**parallel), MODEL, 128) or "")


def test_a_layout_that_does_not_divide_the_width_of_an_expert_is_refused():
    model = Mixtral(dim=64, num_heads=8, num_kv_heads=8, ffn_dim=192, expert_ffn_dim=36)
    reason = "does not divide the inner width of an expert, 36; nearest that does: 4"
    assert reason in (legal.shape(ParallelConfig(tensor=8), model, 128) or "")


def test_a_layout_that_does_not_divide_the_vocabulary_is_refused():
    assert "the vocabulary, 129; nearest that does: 1" in (legal.shape(ParallelConfig(tensor=2), MODEL, 129) or "")
    assert legal.shape(ParallelConfig(tensor=2), MODEL, 128) is None


@pytest.mark.parametrize(("parallel", "tokens", "says"), [
    ({"context": 3}, 32, "needs sequences of a multiple of 6 tokens, they have 32; nearest legal choice: 2"),
    ({"context": 4}, 12, "nearest legal choice: 3"),
    ({"tensor": 4, "context": 2}, 36, "does not divide the 18 tokens of a rank's sequence; nearest that does: 3"),
])
def test_sequences_that_cannot_be_sharded_are_refused(parallel: dict[str, int], tokens: int, says: str):
    assert says in (legal.length(ParallelConfig(**parallel), tokens) or "")


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 96))
def test_sharded_sequences_have_equal_parts(tensor, context, tokens):
    if legal.length(ParallelConfig(tensor=tensor, context=context), tokens) is None:
        assert tokens % (context * tensor) == 0
        assert context == 1 or tokens % (2 * context) == 0


@pytest.mark.parametrize(("parallel", "world", "says"), [
    ({"replicate": 2}, 1, "1 data-parallel workers are not a multiple of parallel.replicate 2; nearest"),
    ({}, 3, "3 workers cannot share 4 virtual ranks"),
    ({"expert": 2}, 1, "1 worker.s. of shard x context are not a multiple of parallel.expert 2; nearest number of "
     "workers that is legal: 2"),
    ({"expert": 4, "context": 2}, 2, "nearest number of workers that is legal: 4"),
])
def test_a_world_size_that_does_not_fit_the_mesh_is_refused(parallel: dict[str, int], world: int, says: str):
    config = build(TrainConfig, {"elastic": {"max_workers": 4}, "parallel": parallel, "model": {"kind": "mixtral"}})
    with pytest.raises(ConfigError, match=says):
        legal.check_world(config, world)


def test_the_layout_does_not_change_the_recipe_hash():
    plain, spread = TrainConfig(), TrainConfig.model_validate({"parallel": {"data": "zero3"}})
    assert plain.recipe_hash() == spread.recipe_hash()


def test_world_sizes_with_too_few_micro_batches_for_the_schedule_are_illegal():
    config = build(TrainConfig, {"elastic": {"max_workers": 16}}, ["parallel.pipeline=4"])
    assert legal.sizes(config) == (4, 8)  # 16 workers would have 2 micro-batches each
    with pytest.raises(ConfigError, match="nearest number that it can: 4"):
        legal.check_world(config, 16)


def test_only_numbers_of_workers_whose_copies_share_the_experts_are_legal():
    values = {"elastic": {"max_workers": 16}, "model": {"kind": "mixtral", "num_experts": 8}}
    assert legal.sizes(build(TrainConfig, values, ["parallel.expert=2"])) == (2, 4)
    assert legal.sizes(build(TrainConfig, values, ["parallel.expert=4", "parallel.context=2"])) == (4, 8)
    assert legal.sizes(build(TrainConfig, values, ["parallel.expert=2", "parallel.replicate=2"])) == (4,)


def test_sums_in_bf16_belong_to_the_recipe():
    plain, rounded = build(TrainConfig, {}), build(TrainConfig, {}, ("parallel.reduce_dtype=bf16",))
    assert rounded.recipe_hash() != plain.recipe_hash()
    same = build(TrainConfig, {}, ("parallel.reduce_dtype=fp32", "parallel.data=ddp"))
    assert same.recipe_hash() == plain.recipe_hash()


def test_micro_batches_are_never_added_up_in_bf16():
    """FSDP2 adds them up before the all-reduce over replicas, in the dtype of the reduction."""
    copies = ("parallel.replicate=2", "parallel.reduce_dtype=bf16")
    assert "nearest legal choice: reduce step" in refused(*copies, "parallel.reduce=micro_batch")
    mesh = Mesh({"pipeline": 1, "replicate": 2, "shard": 2, "context": 1, "tensor": 1}, 0, None)
    values = {"elastic": {"max_workers": 16}}
    assert not reduces_always(build(TrainConfig, values, copies), mesh, 10**9)
    assert reduces_always(build(TrainConfig, values, copies[:1]), mesh, 10**9)
