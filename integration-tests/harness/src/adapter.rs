//! LoRA adapters in PEFT's format, with pseudo-random weights.

use std::{fs, io, path::Path};

/// Shape of a model: sizes of the hidden state, all queries, all keys, and the feed-forward
/// network.
#[derive(Clone, Copy, Debug)]
pub struct ModelShape {
    pub layers: usize,
    pub hidden: usize,
    pub queries: usize,
    pub keys: usize,
    pub ffn: usize,
}

impl ModelShape {
    /// SmolLM2-135M.
    pub const SMOLLM2: Self = Self { layers: 30, hidden: 576, queries: 576, keys: 192, ffn: 1536 };

    /// Returns the modules of a layer with their numbers of output and input features.
    fn modules(self) -> [(&'static str, usize, usize); 7] {
        let Self { hidden, queries, keys, ffn, .. } = self;
        [
            ("self_attn.q_proj", queries, hidden),
            ("self_attn.k_proj", keys, hidden),
            ("self_attn.v_proj", keys, hidden),
            ("self_attn.o_proj", hidden, queries),
            ("mlp.gate_proj", ffn, hidden),
            ("mlp.up_proj", ffn, hidden),
            ("mlp.down_proj", hidden, ffn),
        ]
    }
}

/// Writes an adapter of all linear layers. Equal seeds give equal adapters. The elements are at
/// most `magnitude`.
pub fn write(
    folder: &Path,
    shape: ModelShape,
    rank: usize,
    seed: u64,
    magnitude: f32,
) -> io::Result<()> {
    let (mut entries, mut data) = (Vec::new(), Vec::new());
    let mut state = seed;
    let mut number = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * magnitude
    };
    for layer in 0..shape.layers {
        for (module, rows, cols) in shape.modules() {
            for (part, [rows, cols]) in [("A", [rank, cols]), ("B", [rows, rank])] {
                let begin = data.len();
                data.extend((0..rows * cols).flat_map(|_| number().to_le_bytes()));
                entries.push(format!(
                    "\"base_model.model.model.layers.{layer}.{module}.lora_{part}.weight\":\
                     {{\"dtype\":\"F32\",\"shape\":[{rows},{cols}],\"data_offsets\":[{begin},{}]}}",
                    data.len()
                ));
            }
        }
    }
    let header = format!("{{{}}}", entries.join(","));
    let length = (header.len() as u64).to_le_bytes();
    let file = [&length[..], header.as_bytes(), &data].concat();
    fs::write(folder.join("adapter_model.safetensors"), file)?;
    let config = format!("{{\"peft_type\":\"LORA\",\"r\":{rank},\"lora_alpha\":{rank}}}");
    fs::write(folder.join("adapter_config.json"), config)
}
