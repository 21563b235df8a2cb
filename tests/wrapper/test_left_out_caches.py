"""Keys and values of causal models: training steps under a limit run with use_cache=False."""

from __future__ import annotations

import contextlib
import copy
import inspect

import pytest
import torch
from gpt2_models import small_gpt2
from torchvision_standins import import_torchvision
from training import same

import rotor
from rotor.integrations.planned import PlannedForward

with contextlib.suppress(ModuleNotFoundError):
    # Transformers imports torchvision where it is there.
    import_torchvision()
transformers = pytest.importorskip("transformers")

from transformers import DynamicCache, GPT2LMHeadModel  # noqa: E402

WORDS, LENGTH, LAYERS, BATCH = 120, 32, 2, 8
MATCH = "run with use_cache=False"


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


def check(model, expected, twin, **arguments):
    """Check that a step has the bits of a plain one without a cache; return its output."""
    found = step(model, tokens(), **arguments)
    assert type(found) is type(expected)
    assert torch.equal(expected.loss, found.loss)
    assert torch.equal(expected.logits, found.logits)
    assert same(gradients(twin), gradients(model))
    assert found.past_key_values is None
    return found


@pytest.mark.slow
def test_a_limit_without_room_for_the_cache_is_kept():
    plain, model = make_model(4), limited(make_model(4), 1_150_000)
    expected = step(plain, tokens(), use_cache=False)
    with pytest.warns(rotor.MemoryLimitWarning, match=f"of 1.1 MiB .* {MATCH}") as caught:
        check(model, expected, plain)
    assert len(caught) == 1
    check(model, expected, plain)
    assert model.plan.measured_bytes <= 1_150_000


@pytest.mark.parametrize(
    "arguments, config, warns",
    [
        ({}, {}, True),
        ({"use_cache": None}, {}, True),
        ({"use_cache": True}, {}, True),
        ({"use_cache": True}, {"use_cache": False}, True),
        ({"use_cache": False}, {}, False),
        ({}, {"use_cache": False}, False),
    ],
)
def test_what_was_asked_for_is_told_once(arguments, config, warns):
    plain, model = make_model(1), limited(make_model(1, **config))
    expected = step(plain, tokens(), use_cache=False)
    with pytest.warns(rotor.MemoryLimitWarning, match=MATCH) if warns else contextlib.nullcontext():
        check(model, expected, plain, **arguments)
    check(model, expected, plain, **arguments)


def test_an_argument_that_is_given_by_its_place_is_replaced():
    names = list(inspect.signature(GPT2LMHeadModel.forward).parameters)[1:-1]
    model, plain, ids = limited(make_model(1)), make_model(1), tokens()
    expected = step(plain, ids, use_cache=False)
    given = {"input_ids": ids, "labels": ids, "use_cache": True}
    torch.manual_seed(3)
    with pytest.warns(rotor.MemoryLimitWarning, match=MATCH):
        found = model(*(given.get(name) for name in names))
    found.loss.backward()
    assert found.past_key_values is None
    assert torch.equal(expected.loss, found.loss)
    assert same(gradients(plain), gradients(model))


def test_calls_that_do_not_train_keep_their_caches():
    model, ids = limited(make_model(1)), tokens()
    with torch.no_grad():
        assert type(model(ids).past_key_values) is DynamicCache
    model.eval()
    assert type(model(ids).past_key_values) is DynamicCache
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = make_model(1).eval().generate(ids[:, :4], **options)
    assert torch.equal(model.generate(ids[:, :4], **options), expected)


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_a_cache_that_is_given_stays():
    plain, model = make_model(1), limited(make_model(1), "1 GB")

    def train(part):
        torch.manual_seed(2)
        with torch.no_grad():
            past = part(tokens()[:, :8]).past_key_values
        return step(part, tokens()[:, 8:], past_key_values=past)

    expected, found = train(plain), train(model)
    assert found.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
    assert torch.equal(expected.loss, found.loss)
    assert same(gradients(plain), gradients(model))


@pytest.mark.parametrize("has_loss", [None, lambda arguments: "labels" in arguments])
def test_a_planned_forward_leaves_the_cache_out(has_loss):
    plain, model = make_model(1), make_model(1)
    planned = PlannedForward(model, has_loss=has_loss, mem_limit="8 MB", effort="fast")
    planned.install()
    with pytest.warns(rotor.MemoryLimitWarning, match=MATCH):
        check(model, step(plain, tokens(), use_cache=False), plain)
    planned.remove()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_low_rank_parts_of_a_model_leave_the_cache_out():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    plain, model = (peft.get_peft_model(make_model(1), config) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    expected = step(plain, tokens(), use_cache=False)
    with pytest.warns(rotor.MemoryLimitWarning, match=MATCH):
        found = step(limited(model), tokens())
    assert torch.equal(expected.loss, found.loss)
    assert found.past_key_values is None


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


def make_bert():
    return transformers.BertModel(small(transformers.BertConfig, vocab_size=60))


def make_encoder():
    return transformers.T5EncoderModel(make_t5().config)


IDS = torch.arange(16).reshape(2, 8) + 5
PIXELS = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)
IMAGES_AND_IDS = torch.cat([torch.full((2, 4), 59), IDS], 1)
LABELLED = {"input_ids": IDS, "labels": IDS}
BOTH = {"input_ids": IDS, "decoder_input_ids": IDS}


@pytest.mark.parametrize(
    "make, batch, warns",
    [
        (make_t5, LABELLED, True),
        (make_t5_asked_by_decoder, LABELLED, True),
        (make_encoder, {"input_ids": IDS}, False),
        (make_bert, {"input_ids": IDS}, False),
        (make_llava, {"pixel_values": PIXELS, "input_ids": IMAGES_AND_IDS}, True),
        (make_vision_decoder, {"pixel_values": PIXELS, "labels": IDS}, True),
        (make_text_decoder, BOTH, True),
        (make_bart, BOTH, True),
        (make_bart, LABELLED, True),
        (make_classifier, {"input_ids": IDS, "labels": torch.tensor([0, 1])}, True),
    ],
)
def test_the_cache_is_left_out_wherever_a_nested_configuration_asks_for_it(make, batch, warns):
    def train(model, **arguments):
        torch.manual_seed(2)
        output = model(**batch, **arguments)
        next(value for value in output.values() if torch.is_tensor(value)).mean().backward()
        return output

    torch.manual_seed(0)
    plain = make().train()
    model = rotor.Checkpointable(copy.deepcopy(plain), mem_limit="1 GB", engine="dynamic")
    expected = train(plain, use_cache=False)
    with pytest.warns(rotor.MemoryLimitWarning, match=MATCH) if warns else contextlib.nullcontext():
        found = train(model)
    assert list(found.keys()) == list(expected.keys())
    for name, value in expected.items():
        assert not torch.is_tensor(value) or torch.equal(found[name], value)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)
    assert getattr(found, "cache", None) is None
