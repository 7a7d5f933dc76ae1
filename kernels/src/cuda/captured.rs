//! In debug builds: the memory that recorded work touches, so that each replay is known to find it.
//!
//! A recording holds addresses as plain numbers among its kernels' parameters. The driver gives every
//! allocation a number of its own, so memory that was freed, or has become another's, is found out.

use std::{collections::BTreeMap, mem::MaybeUninit, ptr};

use cudarc::driver::sys;

use super::error::{CudaError, Named};

/// What lies in kernels' parameters where an address may.
const WORD: usize = size_of::<sys::CUdeviceptr>();

/// Of each allocation that a recording touches: the driver's number, and one address in it.
#[derive(Debug, Default)]
pub(super) struct Captured(BTreeMap<u64, sys::CUdeviceptr>);

impl Captured {
    /// StuckLimits through all parameters of `graph`, whose context is bound. Finds nothing in builds that
    /// are not for debugging.
    pub fn of(graph: sys::CUgraph) -> Result<Self, CudaError> {
        let mut found = BTreeMap::new();
        if !cfg!(debug_assertions) {
            return Ok(Self(found));
        }
        let mut note = |address| {
            if let Some(allocation) = allocation_of(address) {
                found.entry(allocation).or_insert(address);
            }
        };
        for node in nodes(graph)? {
            let mut kind = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
            // SAFETY: the node is its graph's, which is alive; the result is ours.
            unsafe { sys::cuGraphNodeGetType(node, &mut kind) }
                .result()
                .named("cuGraphNodeGetType")?;
            match kind {
                sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL => each_word(node, &mut note)?,
                sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMSET => {
                    let mut params = MaybeUninit::uninit();
                    // SAFETY: as above; the node is of this kind.
                    unsafe { sys::cuGraphMemsetNodeGetParams(node, params.as_mut_ptr()) }
                        .result()
                        .named("cuGraphMemsetNodeGetParams")?;
                    // SAFETY: the call has succeeded, so it was written.
                    note(unsafe { params.assume_init() }.dst);
                }
                sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMCPY => {
                    let mut params = MaybeUninit::uninit();
                    // SAFETY: as above.
                    unsafe { sys::cuGraphMemcpyNodeGetParams(node, params.as_mut_ptr()) }
                        .result()
                        .named("cuGraphMemcpyNodeGetParams")?;
                    // SAFETY: as above.
                    let params = unsafe { params.assume_init() };
                    note(params.srcDevice);
                    note(params.dstDevice);
                }
                _ => {}
            }
        }
        Ok(Self(found))
    }

    /// # Panics
    /// When memory that the recording touches is gone, or another's: a defect.
    pub fn verify(&self) {
        for (allocation, address) in &self.0 {
            assert_eq!(
                allocation_of(*address),
                Some(*allocation),
                "recorded work would touch {address:#x}, whose memory is no longer what was recorded"
            );
        }
    }
}

fn nodes(graph: sys::CUgraph) -> Result<Vec<sys::CUgraphNode>, CudaError> {
    let mut count = 0;
    // SAFETY: without room it only counts.
    unsafe { sys::cuGraphGetNodes(graph, ptr::null_mut(), &mut count) }
        .result()
        .named("cuGraphGetNodes")?;
    let mut nodes = vec![ptr::null_mut(); count];
    // SAFETY: there is room for as many as it counted; the graph belongs to this thread.
    unsafe { sys::cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count) }
        .result()
        .named("cuGraphGetNodes")?;
    nodes.truncate(count);
    Ok(nodes)
}

/// Every aligned word of a kernel's parameters, also within structs.
fn each_word(
    node: sys::CUgraphNode,
    note: &mut impl FnMut(sys::CUdeviceptr),
) -> Result<(), CudaError> {
    let mut params = MaybeUninit::uninit();
    // SAFETY: the node is a kernel's, and alive; the result is ours.
    unsafe { sys::cuGraphKernelNodeGetParams_v2(node, params.as_mut_ptr()) }
        .result()
        .named("cuGraphKernelNodeGetParams")?;
    // SAFETY: the call has succeeded, so it was written.
    let params: sys::CUDA_KERNEL_NODE_PARAMS = unsafe { params.assume_init() };
    if params.kernelParams.is_null() {
        return Ok(());
    }
    for index in 0.. {
        let (mut offset, mut bytes) = (0, 0);
        // SAFETY: one of the two is the node's kernel; behind its last parameter the answer is an error.
        let answer = unsafe {
            match params.func.is_null() {
                true => sys::cuKernelGetParamInfo(params.kern, index, &mut offset, &mut bytes),
                false => sys::cuFuncGetParamInfo(params.func, index, &mut offset, &mut bytes),
            }
        };
        if answer != sys::CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        // SAFETY: the node keeps a copy of each parameter, as long as the kernel says.
        let parameter = unsafe {
            std::slice::from_raw_parts((*params.kernelParams.add(index)).cast::<u8>(), bytes)
        };
        for word in parameter.as_chunks::<WORD>().0 {
            note(sys::CUdeviceptr::from_ne_bytes(*word));
        }
    }
    Ok(())
}

/// The driver's number of the allocation that holds `address`; `None` when that is no address.
fn allocation_of(address: sys::CUdeviceptr) -> Option<u64> {
    let mut allocation = 0_u64;
    let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID;
    // SAFETY: the attribute is of this type; any number may be asked about.
    let answer =
        unsafe { sys::cuPointerGetAttribute((&raw mut allocation).cast(), attribute, address) };
    (answer == sys::CUresult::CUDA_SUCCESS && allocation != 0).then_some(allocation)
}
