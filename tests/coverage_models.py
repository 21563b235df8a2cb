"""Public model families with random weights, small enough to train for a few steps on one core.

`MODELS` names them; `build` makes one. torchvision, timm and transformers are needed for those of
their own only, and can be installed without their dependencies on any PyTorch build::

    pip install --no-deps torchvision timm transformers
    pip install tokenizers safetensors huggingface-hub regex pyyaml tqdm requests typer

Where torchvision's compiled operators do not load, empty definitions stand in for them: no model
here calls one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from coverage_samples import (
    CLASSES,
    SMALL,
    TOKENS,
    Sample,
    clip_inputs,
    clip_options,
    ids,
    language,
    named,
    pixels,
    prepare,
    segformer_inputs,
    segmentation,
    seq2seq,
    small_vit,
    speech,
    timm,
    torchvision,
    transcribed,
    whisper_inputs,
)

__all__ = ["MODELS", "Sample", "build", "package_of", "prepare"]

_VISION = {k: v for k, v in SMALL.items() if "token_id" not in k and k != "vocab_size"} | {
    "num_labels": CLASSES
}
_D_MODEL = {
    "vocab_size": TOKENS,
    "d_model": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_SPEECH = SMALL | {
    "vocab_size": 32,
    "conv_dim": (64,) * 7,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}
_PATCHED = _VISION | {"image_size": 64, "patch_size": 8}
_T5 = {"vocab_size": TOKENS, "d_model": 128, "d_kv": 32, "d_ff": 256}
_T5 |= {"num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
_WINDOWED = {"image_size": 64, "patch_size": 4, "embed_dim": 32, "depths": [2, 2]}
_WINDOWED |= {"num_heads": [2, 4], "window_size": 4, "num_labels": CLASSES}
_GROUPED = {"num_key_value_heads": 2}

MODELS: dict[str, Callable[[], Sample]] = {
    # torchvision
    "tv/resnet18": torchvision("resnet18", 64),
    "tv/vit_small": small_vit,
    "tv/resnet50": torchvision("resnet50"),
    "tv/vgg11": torchvision("vgg11", 64, 8),
    "tv/densenet121": torchvision("densenet121"),
    "tv/mobilenet_v3": torchvision("mobilenet_v3_small", 128, 8),
    "tv/efficientnet_b0": torchvision("efficientnet_b0"),
    "tv/regnet": torchvision("regnet_y_400mf", 128),
    "tv/convnext_tiny": torchvision("convnext_tiny"),
    "tv/swin_t": torchvision("swin_t", 112),
    "tv/swin_v2_t": torchvision("swin_v2_t", 128, 2),
    "tv/vit_b_16": torchvision("vit_b_16", 128, image_size=128),
    "tv/googlenet": torchvision("googlenet", 128, init_weights=False, aux_logits=True),
    "tv/inception_v3": torchvision("inception_v3", 299, 2, init_weights=False),
    "tv/squeezenet": torchvision("squeezenet1_1", 128),
    "tv/shufflenet": torchvision("shufflenet_v2_x0_5", 128, 8),
    "tv/mnasnet": torchvision("mnasnet0_5", 128, 8),
    "tv/alexnet": torchvision("alexnet", 128, 16),
    "tv/maxvit_t": torchvision("maxvit_t", 224, 1),
    "tv/resnext50": torchvision("resnext50_32x4d"),
    "tv/wide_resnet50": torchvision("wide_resnet50_2", 96, 2),
    "tv/r3d_18": torchvision("r3d_18", (8, 64, 64), 4),
    "tv/fcn_resnet50": segmentation("fcn_resnet50", aux_loss=True),
    "tv/deeplabv3": segmentation("deeplabv3_resnet50"),
    "tv/lraspp": segmentation("lraspp_mobilenet_v3_large"),
    # timm
    "timm/deit": timm("deit_tiny_patch16_224", 224),
    "timm/beit": timm("beit_base_patch16_224", 224, 2, depth=4, embed_dim=192, num_heads=3),
    "timm/mixer": timm("mixer_s32_224", 224),
    "timm/resmlp": timm("resmlp_12_224", 224, 2),
    "timm/poolformer": timm("poolformer_s12", 128),
    "timm/coat": timm("coat_lite_tiny", 96, img_size=96),
    "timm/levit": timm("levit_128s", 224),
    "timm/ghostnet": timm("ghostnet_100", 128),
    "timm/hrnet": timm("hrnet_w18_small", 64, 2),
    "timm/nfnet": timm("nfnet_l0", 96, 2),
    "timm/cspdarknet": timm("cspdarknet53", 96, 2),
    "timm/eva": timm("eva02_tiny_patch14_224", 112, img_size=112),
    "timm/cait": timm("cait_xxs24_224", 96, img_size=96),
    "timm/xcit": timm("xcit_nano_12_p16_224", 128, img_size=128),
    "timm/twins": timm("twins_svt_small", 224, 1),
    "timm/pvt_v2": timm("pvt_v2_b0", 128),
    "timm/mobilevit": timm("mobilevit_xxs", 128),
    "timm/edgenext": timm("edgenext_xx_small", 128),
    "timm/res2net": timm("res2net50_26w_4s", 96, 2),
    "timm/resnest": timm("resnest14d", 96),
    "timm/dla": timm("dla34", 96),
    "timm/dpn": timm("dpn68", 96),
    "timm/efficientformer": timm("efficientformer_l1", 224, 2),
    "timm/fastvit": timm("fastvit_t8", 128),
    "timm/repvgg": timm("repvgg_a0", 96),
    "timm/convit": timm("convit_tiny", 224, 2),
    "timm/crossvit": timm("crossvit_tiny_240", 240, 2),
    "timm/pit": timm("pit_ti_224", 224, 2),
    "timm/tnt": timm("tnt_s_legacy_patch16_224", 224, 1),
    "timm/volo": timm("volo_d1_224", 224, 1),
    "timm/gmlp": timm("gmlp_ti16_224", 224, 2),
    "timm/focalnet": timm("focalnet_tiny_srf", 96, 2),
    "timm/davit": timm("davit_tiny", 112, 2),
    "timm/mobilenetv4": timm("mobilenetv4_conv_small", 128, 8),
    "timm/inception_next": timm("inception_next_tiny", 96, 2),
    "timm/hiera": timm("hiera_tiny_224", 224, 1),
    "timm/rexnet": timm("rexnet_100", 96),
    "timm/sknet": timm("skresnet18", 96),
    "timm/botnet": timm("botnet26t_256", 256, 1),
    "timm/halonet": timm("halonet26t", 256, 1),
    "timm/vovnet": timm("ese_vovnet19b_dw", 96),
    "timm/convmixer": timm("convmixer_768_32", 128, 2),
    # transformers
    "hf/gpt2": language("GPT2LMHeadModel", n_embd=128, n_layer=2, n_head=4),
    "hf/llama": language("LlamaForCausalLM", **_GROUPED),
    "hf/bert": language("BertForMaskedLM"),
    "hf/roberta": language("RobertaForMaskedLM"),
    "hf/distilbert": language(
        "DistilBertForMaskedLM", dim=128, n_layers=2, n_heads=4, hidden_dim=256
    ),
    "hf/albert": language("AlbertForMaskedLM", embedding_size=32),
    "hf/electra": language("ElectraForMaskedLM", embedding_size=32),
    "hf/deberta_v2": language(
        "DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["p2c", "c2p"]
    ),
    "hf/xlm_roberta": language("XLMRobertaForMaskedLM"),
    "hf/mpnet": language("MPNetForMaskedLM"),
    "hf/modernbert": language("ModernBertForMaskedLM"),
    "hf/mistral": language("MistralForCausalLM", **_GROUPED),
    "hf/qwen2": language("Qwen2ForCausalLM", **_GROUPED),
    "hf/qwen3": language("Qwen3ForCausalLM", head_dim=32, **_GROUPED),
    "hf/mixtral": language("MixtralForCausalLM", num_local_experts=4, **_GROUPED),
    "hf/olmoe": language("OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2),
    "hf/gpt_neox": language("GPTNeoXForCausalLM"),
    "hf/gpt_neo": language(
        "GPTNeoForCausalLM", num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
    ),
    "hf/gptj": language("GPTJForCausalLM", n_embd=128, n_layer=2, n_head=4, rotary_dim=16),
    "hf/bloom": language("BloomForCausalLM", n_layer=2, n_head=4),
    "hf/falcon": language("FalconForCausalLM"),
    "hf/phi": language("PhiForCausalLM"),
    "hf/phi3": language("Phi3ForCausalLM"),
    "hf/gemma": language("GemmaForCausalLM", head_dim=32, num_key_value_heads=1),
    "hf/gemma2": language("Gemma2ForCausalLM", head_dim=32, **_GROUPED),
    "hf/stablelm": language("StableLmForCausalLM", num_key_value_heads=4),
    "hf/cohere": language("CohereForCausalLM"),
    "hf/olmo2": language("Olmo2ForCausalLM"),
    "hf/opt": language("OPTForCausalLM", ffn_dim=256, word_embed_proj_dim=128),
    "hf/mamba": language("MambaForCausalLM", state_size=8, use_associative_scan=False),
    "hf/rwkv": language("RwkvForCausalLM", attention_hidden_size=128),
    "hf/xlnet": language("XLNetLMHeadModel", d_model=128, n_layer=2, n_head=4, d_inner=256),
    "hf/t5": named("T5ForConditionalGeneration", seq2seq, **_T5),
    "hf/bart": named("BartForConditionalGeneration", seq2seq, **_D_MODEL),
    "hf/marian": named("MarianMTModel", seq2seq, **_D_MODEL),
    "hf/pegasus": named("PegasusForConditionalGeneration", seq2seq, **_D_MODEL),
    "hf/wav2vec2": named(
        "Wav2Vec2ForCTC", speech, transcribed, **_SPEECH, num_conv_pos_embeddings=16
    ),
    "hf/hubert": named("HubertForCTC", speech, transcribed, **_SPEECH, num_conv_pos_embeddings=16),
    "hf/whisper": named(
        "WhisperForConditionalGeneration",
        whisper_inputs,
        **_D_MODEL,
        max_source_positions=100,
        num_mel_bins=80,
    ),
    "hf/vit": named("ViTForImageClassification", pixels(64), **_PATCHED),
    "hf/deit": named("DeiTForImageClassification", pixels(64), **_PATCHED),
    "hf/dinov2": named("Dinov2ForImageClassification", pixels(64), **_PATCHED),
    "hf/convnextv2": named(
        "ConvNextV2ForImageClassification",
        pixels(64),
        hidden_sizes=[32, 64, 96, 128],
        depths=[1, 1, 2, 1],
        num_labels=CLASSES,
    ),
    "hf/segformer": named("SegformerForSemanticSegmentation", segformer_inputs, num_labels=CLASSES),
    "hf/clip": named("CLIPModel", clip_inputs, **clip_options()),
    "hf/siglip": named("SiglipModel", clip_inputs, **clip_options()),
    "hf/vit_mae": named("ViTMAEModel", pixels(64, labels=False), **_PATCHED),
    "hf/dpt": named(
        "DPTModel", pixels(64, labels=False), **_PATCHED, backbone_out_indices=[0, 0, 1, 1]
    ),
    # more of timm and transformers
    "hf/mamba2": language(
        "Mamba2ForCausalLM",
        num_heads=8,
        head_dim=32,
        state_size=16,
        n_groups=1,
        expand=2,
        chunk_size=32,
    ),
    "hf/mobilebert": language(
        "MobileBertForMaskedLM", embedding_size=32, intra_bottleneck_size=32, true_hidden_size=32
    ),
    "hf/convbert": language("ConvBertForMaskedLM", embedding_size=128),
    "hf/roformer": language("RoFormerForMaskedLM", embedding_size=128),
    "hf/longformer": language(
        "LongformerForMaskedLM", attention_window=16, max_position_embeddings=130
    ),
    "hf/big_bird": language("BigBirdForMaskedLM", attention_type="original_full"),
    "hf/fnet": language("FNetForMaskedLM"),
    "hf/megatron_bert": language("MegatronBertForMaskedLM"),
    "hf/camembert": language("CamembertForMaskedLM"),
    "hf/codegen": language("CodeGenForCausalLM", n_embd=128, n_layer=2, n_head=4, rotary_dim=16),
    "hf/gpt_bigcode": language("GPTBigCodeForCausalLM", n_embd=128, n_layer=2, n_head=4),
    "hf/qwen2_moe": language(
        "Qwen2MoeForCausalLM",
        num_experts=4,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=128,
        **_GROUPED,
    ),
    "hf/qwen3_moe": language(
        "Qwen3MoeForCausalLM",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        head_dim=32,
        **_GROUPED,
    ),
    "hf/deepseek_v3": language(
        "DeepseekV3ForCausalLM",
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=64,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=32,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
    ),
    "hf/gpt_oss": language(
        "GptOssForCausalLM",
        num_local_experts=4,
        head_dim=32,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
        **_GROUPED,
    ),
    "hf/jamba": language(
        "JambaForCausalLM",
        use_mamba_kernels=False,
        num_experts=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        **_GROUPED,
    ),
    "hf/gemma3": language("Gemma3ForCausalLM", head_dim=32, **_GROUPED),
    "hf/nemotron": language("NemotronForCausalLM", **_GROUPED),
    "hf/starcoder2": language("Starcoder2ForCausalLM", **_GROUPED),
    "hf/granite": language("GraniteForCausalLM", **_GROUPED),
    "hf/xglm": language(
        "XGLMForCausalLM", d_model=128, ffn_dim=256, num_layers=2, attention_heads=4
    ),
    "hf/mbart": named("MBartForConditionalGeneration", seq2seq, **_D_MODEL),
    "hf/blenderbot": named("BlenderbotForConditionalGeneration", seq2seq, **_D_MODEL),
    "hf/led": named("LEDForConditionalGeneration", seq2seq, **_D_MODEL, attention_window=16),
    "hf/mt5": named("MT5ForConditionalGeneration", seq2seq, **_T5),
    "hf/beit": named("BeitForImageClassification", pixels(64), **_PATCHED),
    "hf/swin": named("SwinForImageClassification", pixels(64), **_WINDOWED),
    "hf/swinv2": named("Swinv2ForImageClassification", pixels(64), **_WINDOWED),
    "hf/pvt": named("PvtForImageClassification", pixels(64), image_size=64, num_labels=CLASSES),
    "hf/mobilevit": named(
        "MobileViTForImageClassification", pixels(64), image_size=64, num_labels=CLASSES
    ),
    "hf/resnet": named(
        "ResNetForImageClassification",
        pixels(64),
        num_labels=CLASSES,
        embedding_size=16,
        hidden_sizes=[32, 64, 96, 128],
        depths=[1, 1, 1, 1],
    ),
    "hf/regnet": named(
        "RegNetForImageClassification",
        pixels(64),
        num_labels=CLASSES,
        embedding_size=16,
        hidden_sizes=[64, 64, 128, 128],
        depths=[1, 1, 1, 1],
    ),
    "hf/poolformer": named("PoolFormerForImageClassification", pixels(64), num_labels=CLASSES),
    "hf/levit": named("LevitForImageClassification", pixels(224), num_labels=CLASSES),
    "hf/videomae": named(
        "VideoMAEForVideoClassification",
        lambda: {
            "pixel_values": torch.randn(2, 4, 3, 32, 32),
            "labels": torch.randint(0, CLASSES, (2,)),
        },
        **_VISION,
        image_size=32,
        patch_size=8,
        num_frames=4,
        tubelet_size=2,
    ),
    "hf/data2vec_audio": named(
        "Data2VecAudioForCTC", speech, transcribed, **_SPEECH, num_conv_pos_embeddings=4
    ),
    "hf/wavlm": named("WavLMForCTC", speech, transcribed, **_SPEECH, num_conv_pos_embeddings=16),
    "hf/ast": named(
        "ASTForAudioClassification",
        lambda: {
            "input_values": torch.randn(2, 128, 64),
            "labels": torch.randint(0, CLASSES, (2,)),
        },
        **_VISION,
        max_length=128,
        num_mel_bins=64,
    ),
    "hf/dinov3": named(
        "DINOv3ViTModel",
        pixels(64, labels=False),
        **{k: v for k, v in _VISION.items() if k != "num_labels"},
        image_size=64,
        patch_size=8,
    ),
    "hf/vilt": named(
        "ViltModel",
        lambda: {"input_ids": ids(length=16), "pixel_values": torch.randn(4, 3, 64, 64)},
        **{k: v for k, v in SMALL.items() if "token_id" not in k},
        image_size=64,
        patch_size=8,
    ),
    "timm/nest": timm("nest_tiny", 224, 1),
    "timm/tresnet": timm("tresnet_m", 96, 2),
    "timm/selecsls": timm("selecsls42", 96, 2),
    "timm/coatnet": timm("coatnet_nano_rw_224", 224, 1),
    "timm/maxvit": timm("maxvit_nano_rw_256", 256, 1),
    "timm/mvitv2": timm("mvitv2_tiny", 224, 1),
    "timm/tiny_vit": timm("tiny_vit_5m_224", 224, 1),
    "timm/efficientvit": timm("efficientvit_b0", 96),
    "timm/repvit": timm("repvit_m0_9", 96),
    "timm/mobileone": timm("mobileone_s0", 96),
    "timm/vitamin": timm("vit_small_patch16_224", 224, 2),
    "timm/sequencer": timm("sequencer2d_s", 224, 1),
    "timm/lambda": timm("lambda_resnet26t", 256, 1),
    "timm/xception": timm("xception41", 96, 2),
    "timm/senet": timm("seresnet18", 96),
    "timm/cspresnext": timm("cspresnext50", 96, 2),
    "timm/starnet": timm("starnet_s1", 96),
    "timm/swinv2_cr": timm("swinv2_cr_tiny_ns_224", 224, 1),
    "timm/gcvit": timm("gcvit_xxtiny", 224, 1),
    "timm/nextvit": timm("nextvit_small", 96, 2),
    "timm/metaformer": timm("caformer_s18", 96, 2),
    "timm/convformer": timm("convformer_s18", 96, 2),
    "timm/hgnet": timm("hgnetv2_b0", 96),
    "timm/tinynet": timm("tinynet_e", 106),
    "timm/fbnet": timm("fbnetc_100", 96),
    "timm/lcnet": timm("lcnet_050", 96),
    "timm/visformer": timm("visformer_tiny", 224, 2),
}


def package_of(name: str) -> str:
    """The package that a model needs."""
    return {"tv": "torchvision", "timm": "timm", "hf": "transformers"}[name.split("/")[0]]


def build(name: str) -> Sample:
    """Make a model of the table, always the same one.

    Raises
    ------
    ImportError
        Its package is absent.
    """
    prepare(package_of(name))
    torch.manual_seed(0)
    sample = MODELS[name]()
    sample.model.train()
    return sample
