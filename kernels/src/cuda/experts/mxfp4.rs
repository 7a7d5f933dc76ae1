//! GEMMs of experts in MXFP4, with biases and the clamped SwiGLU.

use super::{CudaExperts, Inputs, Stacked};
use crate::{
    backend::{ExpertShape, ExpertWeights, GatedActivation},
    cuda::{
        backend::CudaBackend,
        buffer::{CudaMatrix, CudaVector},
        ffi::{self, Address},
        library::KernelLibrary,
    },
    layout::Dtype,
};

/// Returns the address of the first expert's bias, or 0 without biases, and the number of elements
/// from one bias to the next.
///
/// # Panics
/// When the distance between the biases or their lengths differ, which is a bug.
fn stacked<'a>(mut biases: impl Iterator<Item = &'a CudaVector>, len: usize) -> (Address, i64) {
    let Some(first) = biases.next().filter(|bias| bias.len > 0) else { return (0, 0) };
    let (base, mut stride) = (first.data.address(), 0);
    assert_eq!(first.len, len, "experts: the length of a bias");
    for (index, bias) in (1..).zip(biases) {
        let distance = bias.data.address() - base;
        if index == 1 {
            stride = distance;
        }
        let is_next = distance == index * stride && bias.len == len;
        assert!(is_next, "biases of experts have equal lengths and are equally far apart");
    }
    (base, (stride / size_of::<f32>() as u64) as i64)
}

impl CudaBackend {
    /// Computes the experts in MXFP4 for `inputs`: gate and up with the activation, then down. The
    /// lists that routing has written name the rows of each expert.
    pub(super) fn run_mxfp4(
        &self,
        rows: usize,
        inputs: &Inputs,
        weights: &ExpertWeights<'_, CudaMatrix, CudaVector>,
        (gate_up, down): (&Stacked<'_>, &Stacked<'_>),
        buffers: &CudaExperts,
    ) {
        let GatedActivation::ClampedSwiGlu { alpha, limit } = weights.activation else {
            panic!("experts in MXFP4 have a clamped SwiGLU");
        };
        let ExpertShape { count, chosen, hidden, size, .. } = buffers.shape;
        let biases = weights.biases.iter();
        let (bias, bias_stride) = stacked(biases.clone().map(|bias| &bias.0), 2 * size);
        let shared = ffi::Mxfp4GemmArgs {
            offsets: buffers.offsets.address(),
            order: buffers.order.address(),
            rows: rows as i32,
            experts: count as i32,
            count: chosen as i32,
            grid: self.skinny_parts().sms,
            pdl: self.skinny_parts().starts_early.into(),
            alpha,
            limit,
            ..ffi::Mxfp4GemmArgs::default()
        };
        let outputs = buffers.outputs.part(0, rows * chosen * hidden * Dtype::Bf16.bytes());
        self.mxfp4_gemm(gate_up.mxfp4_args(ffi::Mxfp4GemmArgs {
            bias,
            bias_stride,
            x: inputs.x,
            x_stride: inputs.x_stride as i64,
            scales: inputs.scales,
            out: buffers.activated.part(0, rows * chosen * size * Dtype::Bf16.bytes()),
            out_stride: size as i64,
            // The outputs are written later.
            sorted: outputs,
            is_gate_up: 1,
            ..shared
        }));
        let (bias, bias_stride) = stacked(biases.map(|bias| &bias.1), hidden);
        self.mxfp4_gemm(down.mxfp4_args(ffi::Mxfp4GemmArgs {
            bias,
            bias_stride,
            x: buffers.activated.address(),
            x_stride: size as i64,
            out: outputs,
            out_stride: hidden as i64,
            ..shared
        }));
    }

    fn mxfp4_gemm(&self, args: ffi::Mxfp4GemmArgs) {
        self.run(|library, stream| {
            // SAFETY: weights, biases, inputs and outputs have the sizes checked here and in
            // `run_experts`. Routing, which has written the lists, was launched before gate and up,
            // and so at least two kernels before down.
            unsafe { launch!(library, stream, baton_mxfp4_gemm(&args)) }
        });
    }
}

impl Stacked<'_> {
    /// Returns the arguments of a GEMM with these weights.
    fn mxfp4_args(&self, args: ffi::Mxfp4GemmArgs) -> ffi::Mxfp4GemmArgs {
        ffi::Mxfp4GemmArgs {
            weight: self.first.data.address(),
            weight_stride: self.stride as i64,
            n: self.first.rows as i32,
            depth: self.first.cols as i32,
            ..args
        }
    }
}
