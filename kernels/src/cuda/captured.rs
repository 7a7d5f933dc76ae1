//! In debug builds: checks before each replay that the memory a CUDA graph uses is still allocated.
//!
//! A graph holds addresses as plain numbers in kernel parameters. The driver gives every allocation
//! a unique id, which detects memory that was freed or reallocated.

use std::{collections::BTreeMap, mem::MaybeUninit, ptr};

use cudarc::driver::sys;

use super::error::{CudaError, Named};

/// Bytes of an address within kernel parameters.
const WORD: usize = size_of::<sys::CUdeviceptr>();

/// For each allocation that a graph uses: the driver's buffer id, and one address in the
/// allocation.
#[derive(Debug, Default)]
pub(super) struct Captured(BTreeMap<u64, sys::CUdeviceptr>);

impl Captured {
    /// Scans the parameters of all nodes of `graph`, whose context is bound. Returns an empty set
    /// in release builds.
    pub(super) fn of(graph: sys::CUgraph) -> Result<Self, CudaError> {
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
            // SAFETY: the graph of the node is alive, and `kind` is writable.
            unsafe { sys::cuGraphNodeGetType(node, &mut kind) }.named("cuGraphNodeGetType")?;
            match kind {
                sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL => each_word(node, &mut note)?,
                sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMSET => {
                    let mut params = MaybeUninit::uninit();
                    // SAFETY: the graph of the node is alive, the node is a memset node, and
                    // `params` is writable.
                    unsafe { sys::cuGraphMemsetNodeGetParams(node, params.as_mut_ptr()) }
                        .named("cuGraphMemsetNodeGetParams")?;
                    // SAFETY: the call succeeded and initialized `params`.
                    note(unsafe { params.assume_init() }.dst);
                }
                sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMCPY => {
                    let mut params = MaybeUninit::uninit();
                    // SAFETY: the graph of the node is alive, the node is a memcpy node, and
                    // `params` is writable.
                    unsafe { sys::cuGraphMemcpyNodeGetParams(node, params.as_mut_ptr()) }
                        .named("cuGraphMemcpyNodeGetParams")?;
                    // SAFETY: the call succeeded and initialized `params`.
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
    /// When memory that the graph uses was freed or reallocated, which is a bug.
    pub(super) fn verify(&self) {
        for (allocation, address) in &self.0 {
            assert_eq!(
                allocation_of(*address),
                Some(*allocation),
                "the CUDA graph would access {address:#x}, whose memory was freed or reused after capture"
            );
        }
    }
}

fn nodes(graph: sys::CUgraph) -> Result<Vec<sys::CUgraphNode>, CudaError> {
    let mut count = 0;
    // SAFETY: with a null list the call only counts the nodes.
    unsafe { sys::cuGraphGetNodes(graph, ptr::null_mut(), &mut count) }.named("cuGraphGetNodes")?;
    let mut nodes = vec![ptr::null_mut(); count];
    // SAFETY: the list has room for `count` nodes, and no other thread has the graph.
    unsafe { sys::cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count) }
        .named("cuGraphGetNodes")?;
    nodes.truncate(count);
    Ok(nodes)
}

/// Passes every aligned word of a kernel's parameters to `note`, words within structs included.
fn each_word(
    node: sys::CUgraphNode,
    note: &mut impl FnMut(sys::CUdeviceptr),
) -> Result<(), CudaError> {
    let mut params = MaybeUninit::uninit();
    // SAFETY: the node is a live kernel node, and `params` is writable.
    unsafe { sys::cuGraphKernelNodeGetParams_v2(node, params.as_mut_ptr()) }
        .named("cuGraphKernelNodeGetParams")?;
    // SAFETY: the call succeeded and initialized `params`.
    let params: sys::CUDA_KERNEL_NODE_PARAMS = unsafe { params.assume_init() };
    if params.kernelParams.is_null() {
        return Ok(());
    }
    for index in 0.. {
        let (mut offset, mut bytes) = (0, 0);
        // SAFETY: one of the two handles is the node's kernel. Past the last parameter the call
        // fails.
        let answer = unsafe {
            match params.func.is_null() {
                true => sys::cuKernelGetParamInfo(params.kern, index, &mut offset, &mut bytes),
                false => sys::cuFuncGetParamInfo(params.func, index, &mut offset, &mut bytes),
            }
        };
        if answer != sys::CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        // SAFETY: the node keeps a copy of each parameter, `bytes` long.
        let parameter = unsafe {
            std::slice::from_raw_parts((*params.kernelParams.add(index)).cast::<u8>(), bytes)
        };
        for word in parameter.as_chunks::<WORD>().0 {
            note(sys::CUdeviceptr::from_ne_bytes(*word));
        }
    }
    Ok(())
}

/// Returns the driver's buffer id of the allocation that holds `address`, or `None` for a
/// non-address.
fn allocation_of(address: sys::CUdeviceptr) -> Option<u64> {
    let mut allocation = 0_u64;
    let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID;
    // SAFETY: the attribute is a `u64`; the driver accepts any address.
    let answer =
        unsafe { sys::cuPointerGetAttribute((&raw mut allocation).cast(), attribute, address) };
    (answer == sys::CUresult::CUDA_SUCCESS && allocation != 0).then_some(allocation)
}
