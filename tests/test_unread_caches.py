"""Keys and values of causal models: left out of a training step until they are read."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch
from gpt2_models import small_gpt2
from torchvision_standins import import_torchvision

import rotor
from rotor.integrations.planned import PlannedForward
from rotor.wrapper.caches import UnreadCache

with contextlib.suppress(ModuleNotFoundError):
    # Transformers imports torchvision where it is there.
    import_torchvision()
transformers = pytest.importorskip("transformers")

from transformers import DynamicCache, GPT2LMHeadModel  # noqa: E402
from transformers.cache_utils import Cache  # noqa: E402

WORDS, LENGTH, LAYERS, WIDTH, BATCH = 120, 32, 2, 32, 8
LIMIT = 1_150_000


def make_model(layers=LAYERS, **changes) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return small_gpt2(layers, WORDS, LENGTH, **changes)


def tokens(seed=1):
    return torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def limited(model=None, limit="8 MB", **options):
    model = make_model() if model is None else model
    return rotor.Checkpointable(
        model, mem_limit=limit, effort="fast", verbosity=0, planning="before", **options
    )


def step(model, ids, **arguments):
    model.zero_grad()
    torch.manual_seed(3)
    output = model(ids, labels=ids, **arguments)
    output.loss.backward()
    return output


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


def equal(first, second) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.slow
def test_a_limit_without_room_for_the_cache_is_kept():
    plain, model, limit = make_model(4), limited(make_model(4), LIMIT), LIMIT
    expected, found = step(plain, tokens()), step(model, tokens())
    assert torch.equal(expected.loss, found.loss)
    assert equal(gradients(plain), gradients(model))
    assert model.plan.measured_bytes <= limit
    # Keys and values that are kept leave no plan under this limit.
    with pytest.raises(rotor.InfeasibleError) as error:
        step(limited(make_model(4), limit), tokens(), use_cache=True)
    assert error.value.minimum_bytes > limit

    assert type(found) is type(expected)
    assert list(found.keys()) == list(expected.keys())
    assert torch.equal(found[1], expected[1])
    assert len(found.to_tuple()) == len(expected.to_tuple())
    assert isinstance(found.past_key_values, Cache)
    assert not hasattr(found.past_key_values, "dtype")
    assert "when they are read" in repr(found)
    assert type(torch.utils._pytree.tree_map(lambda part: part, found)) is type(expected)


def test_reading_gives_the_values_and_one_warning_and_keeps_them_from_then_on():
    plain, model = make_model(), limited()
    ids = tokens()
    expected, found = step(plain, ids), step(model, ids)
    state = torch.get_rng_state()
    with pytest.warns(rotor.MemoryLimitWarning, match="128 KiB .*use_cache=True") as caught:
        assert len(found.past_key_values) == LAYERS
    assert len(caught) == 1
    assert torch.equal(state, torch.get_rng_state())
    layers = [output.past_key_values.layers for output in (found, expected)]
    for ours, theirs in zip(*layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
    step(model, ids)
    following = step(model, ids)
    assert type(following.past_key_values) is DynamicCache
    assert equal(gradients(plain), gradients(model))
    assert model.plan.measured_bytes <= 8_000_000


def test_gradients_flow_through_a_cache_that_is_read_before_the_backward():
    ids = tokens()

    def train(model, steps):
        for _ in range(steps):
            model.zero_grad()
            torch.manual_seed(3)
            output = model(ids, labels=ids)
            extra = output.past_key_values.layers[1].values.square().mean()
            (output.loss + extra).backward()
        return gradients(model)

    expected, model = train(make_model(), 1), limited()
    with pytest.warns(rotor.MemoryLimitWarning, match="was read"):
        found = train(model, 1)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    for ours, theirs in zip(train(model, 2), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_cache_is_copied_and_pickled_as_the_real_one():
    model = limited()
    model.transformer.requires_grad_(False)
    model.transformer.ln_f.requires_grad_(True)
    output = step(model, tokens())
    with pytest.warns(rotor.MemoryLimitWarning, match="was read"):
        assert type(copy.copy(output.past_key_values)) is DynamicCache
    assert type(pickle.loads(pickle.dumps(output.past_key_values))) is DynamicCache


def test_reading_after_the_update_names_the_cure():
    model = limited()
    output = step(model, tokens())
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match="use_cache=True to keep them"):
        _ = output.past_key_values.layers


@pytest.mark.parametrize(
    "config, arguments, kind",
    [
        ({"use_cache": False}, {}, type(None)),
        ({}, {"use_cache": True}, DynamicCache),
        ({}, {"return_dict": False}, tuple),
    ],
)
def test_the_output_is_as_asked_for(config, arguments, kind):
    model = limited(make_model(1, **config), "1 GB")
    output = model(tokens(), labels=tokens(), **arguments)
    if kind is tuple:
        assert type(output) is tuple
        assert type(output[2]) is DynamicCache
    else:
        assert type(output.past_key_values) is kind


def test_a_loss_that_reads_the_cache_gets_it():
    def loss(output, *_):
        return output.loss + output.past_key_values.layers[0].keys.mean()

    ids, plain, model = tokens(), make_model(1), limited(make_model(1), loss_fn=loss)
    torch.manual_seed(3)
    loss(plain(ids, labels=ids)).backward()
    torch.manual_seed(3)
    model(ids, labels=ids, targets=(None,)).backward()
    assert equal(gradients(plain), gradients(model))


@pytest.mark.parametrize("has_loss", [None, lambda arguments: "labels" in arguments])
def test_a_planned_forward_leaves_the_cache_out(has_loss):
    plain, model, ids = make_model(1), make_model(1), tokens()
    planned = PlannedForward(model, has_loss=has_loss, mem_limit="8 MB", effort="fast")
    planned.install()
    expected, found = step(plain, ids), step(model, ids)
    assert equal(gradients(plain), gradients(model))
    assert isinstance(found.past_key_values, UnreadCache)
    with pytest.warns(rotor.MemoryLimitWarning, match="was read: 64 KiB"):
        keys = found.past_key_values.layers[0].keys
    assert torch.equal(keys, expected.past_key_values.layers[0].keys)
    planned.remove()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_low_rank_parts_of_a_model_leave_the_cache_out():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    plain, model = (peft.get_peft_model(make_model(1), config) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    limit = limited(model)
    expected, found = step(plain, tokens()), step(limit, tokens())
    assert torch.equal(expected.loss, found.loss)
    assert isinstance(found.past_key_values, UnreadCache)


def small(kind, **changes):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return kind(intermediate_size=32, **sizes, **changes)


def image_encoder():
    return small(transformers.ViTConfig, image_size=16, patch_size=8)


def text_decoder(**changes):
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    return transformers.GPT2Config(
        vocab_size=60, bos_token_id=0, eos_token_id=1, pad_token_id=0, **sizes, **changes
    )


def make_t5(**changes):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(vocab_size=60, decoder_start_token_id=0, **sizes, **changes)
    return transformers.T5ForConditionalGeneration(config)


def make_t5_asked_above():
    model = make_t5()
    # The decoder has a copy of the configuration, which decides.
    model.config.use_cache = False
    return model


def make_t5_asked_by_decoder():
    model = make_t5()
    model.decoder.config.use_cache = False
    return model


def make_llava():
    vision = small(transformers.CLIPVisionConfig, image_size=16, patch_size=8)
    text = small(transformers.LlamaConfig, vocab_size=60, pad_token_id=0)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=59)
    config.vision_feature_select_strategy = "default"
    return transformers.LlavaForConditionalGeneration(config)


def make_composite(kind, encoder, decoder):
    config = getattr(transformers, f"{kind}Config").from_encoder_decoder_configs(encoder, decoder)
    config.pad_token_id = config.decoder_start_token_id = 0
    return getattr(transformers, f"{kind}Model")(config=config)


def make_vision_decoder():
    decoder = text_decoder(add_cross_attention=True, is_decoder=True)
    return make_composite("VisionEncoderDecoder", image_encoder(), decoder)


def make_text_decoder():
    encoder, decoder = (small(transformers.BertConfig, vocab_size=60) for _ in range(2))
    return make_composite("EncoderDecoder", encoder, decoder)


def make_bart(kind="BartForConditionalGeneration"):
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.BartConfig(
        vocab_size=60, encoder_ffn_dim=32, decoder_ffn_dim=32, **sizes, **heads
    )
    return getattr(transformers, kind)(config)


def make_classifier():
    return transformers.GPT2ForSequenceClassification(text_decoder())


def make_checkpointed():
    model = transformers.GPT2LMHeadModel(text_decoder())
    model.transformer.gradient_checkpointing = True
    return model


def make_state_space():
    config = transformers.MambaConfig(
        vocab_size=60, hidden_size=16, state_size=4, num_hidden_layers=2
    )
    return transformers.MambaForCausalLM(config)


def make_encoder():
    return transformers.T5EncoderModel(make_t5().config)


IDS = torch.arange(16).reshape(2, 8) + 5
PIXELS = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)
IMAGES_AND_IDS = torch.cat([torch.full((2, 4), 59), IDS], 1)
LABELLED = {"input_ids": IDS, "labels": IDS}
BOTH = {"input_ids": IDS, "decoder_input_ids": IDS}


@pytest.mark.parametrize(
    "make, batch, leaves_out",
    [
        (make_t5, LABELLED, True),
        (make_t5_asked_above, LABELLED, True),
        (make_t5_asked_by_decoder, LABELLED, False),
        (make_encoder, {"input_ids": IDS}, False),
        (make_llava, {"pixel_values": PIXELS, "input_ids": IMAGES_AND_IDS}, True),
        (make_vision_decoder, {"pixel_values": PIXELS, "labels": IDS}, True),
        (make_text_decoder, BOTH, True),
        (make_bart, BOTH, True),
        # The forward itself makes none where it has labels.
        (make_bart, LABELLED, False),
        (make_classifier, {"input_ids": IDS, "labels": torch.tensor([0, 1])}, True),
        (make_checkpointed, LABELLED, False),
        (make_state_space, LABELLED, False),
    ],
)
@pytest.mark.filterwarnings("ignore:gradient checkpointing is on:rotor.MemoryLimitWarning")
def test_the_cache_is_left_out_wherever_a_nested_configuration_asks_for_it(make, batch, leaves_out):
    def train(model, **arguments):
        torch.manual_seed(2)
        output = model(**batch, **arguments)
        next(value for value in output.values() if torch.is_tensor(value)).mean().backward()
        return output

    torch.manual_seed(0)
    plain = make().train()
    model = rotor.Checkpointable(copy.deepcopy(plain), mem_limit="1 GB", engine="dynamic")
    twin = copy.deepcopy(plain)
    expected, found = train(plain), train(model)
    assert list(found.keys()) == list(expected.keys())
    # Without a cache, attention reads other strides, and some processors round otherwise.
    exact = train(twin, use_cache=False) if leaves_out else train(twin)
    for name in expected:
        if torch.is_tensor(expected[name]):
            assert torch.equal(found[name], exact[name])
            torch.testing.assert_close(found[name], expected[name])
    parameters = [each.parameters() for each in (model, twin, plain)]
    for ours, theirs, usual in zip(*parameters, strict=True):
        assert (ours.grad is None) == (theirs.grad is None) == (usual.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)
        torch.testing.assert_close(ours.grad, usual.grad)
    cache = getattr(found, "cache", None)
    assert (type(cache) is UnreadCache) is leaves_out
    assert (cache is None) == (getattr(expected, "cache", None) is None)
    if leaves_out:
        with pytest.warns(rotor.MemoryLimitWarning, match="was read"):
            assert cache.get_seq_length() == expected.cache.get_seq_length()
