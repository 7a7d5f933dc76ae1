//! Gemma 3, and the language model of multimodal Gemma 3: norms before and after attention and the
//! feed-forward network, norms of query and key heads, GELU, scaled embeddings, and a sliding
//! window with its own rope theta in most layers.

use kernels::backend::{GatedActivation, NormSpan};
use serde_json::Value;

use super::{AbsentKeys, Family, qwen2::AttentionKind};
use crate::{
    layer::{AttentionSpec, FeedForward, GatedSpec, LayerSpec, Mixer},
    weight::LayerWeight,
};

/// Without `sliding_window_pattern`, every layer of this number has no window.
const PATTERN_DEFAULT: usize = 6;

pub(super) static FAMILY: Family = Family {
    name: "gemma3_text",
    class: "Gemma3ForCausalLM",
    multimodal_class: Some("Gemma3ForConditionalGeneration"),
    absent: AbsentKeys {
        query_head_count: Some(8),
        kv_head_count: Some(4),
        head_dim: Some(256),
        ffn_size: None,
        vocab_size: Some(262_208),
        context_tokens: 131_072,
        query_pre_attn_scalar: Some(256.0),
        rope_theta: 1_000_000.0,
        window_rope_theta: Some(10_000.0),
        rms_eps: 1e-6,
        tied_output: true,
    },
    scales_embedding: true,
    has_norm_offset: true,
    refused: &["attention_bias", "use_bidirectional_attention"],
    layer: LayerSpec {
        mixer: Mixer::Attention(AttentionSpec {
            qk_norm: Some(NormSpan::Head),
            has_post_norm: true,
            ..AttentionSpec::LLAMA
        }),
        feed_forward: FeedForward::Gated(GatedSpec {
            activation: GatedActivation::GeluTanh,
            has_post_norm: true,
        }),
    },
    layers: |fields, full, layer_count| {
        const GELU: &str = "gelu_pytorch_tanh";
        fields.check_word("hidden_activation", &[GELU], "\"gelu_pytorch_tanh\"")?;
        for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
            if let Some(found) = fields.get::<Value>(key)? {
                return Err(fields.unsupported(key, found.to_string(), "null"));
            }
        }
        // A layer's window selects its rope theta, so a model without a window cannot be described.
        let Some(window) = fields.sliding_window()? else {
            return Err(fields.unsupported("sliding_window", "none".into(), "a number of tokens"));
        };
        let windowed = full.with_window(Some(window));
        if let Some(kinds) = fields.get::<Vec<AttentionKind>>("layer_types")? {
            let describe = |kind| match kind {
                AttentionKind::FullAttention => full,
                AttentionKind::SlidingAttention => windowed,
            };
            return Ok(kinds.into_iter().map(describe).collect());
        }
        let pattern: usize = fields.get("sliding_window_pattern")?.unwrap_or(PATTERN_DEFAULT);
        if pattern == 0 {
            return Err(fields.unsupported("sliding_window_pattern", "0".into(), "1 or more"));
        }
        let is_full = |layer: usize| (layer + 1).is_multiple_of(pattern);
        Ok((0..layer_count).map(|layer| if is_full(layer) { full } else { windowed }).collect())
    },
    weight_name: |weight| match weight {
        LayerWeight::FfnNorm => Some("pre_feedforward_layernorm.weight".to_owned()),
        _ => None,
    },
    ..Family::PLAIN
};
