// Profiler ranges by NVTX. NVTX is header-only: its first call searches the environment for a profiler's library.
#include "ranges.h"

#include <nvtx3/nvToolsExt.h>

namespace {

// Keeps Baton's ranges apart from those of libraries.
nvtxDomainHandle_t domain() {
  static const nvtxDomainHandle_t handle = nvtxDomainCreateA("baton");
  return handle;
}

}  // namespace

BATON_API void baton_range_push(const char* name, uint64_t number) {
  nvtxEventAttributes_t attributes = {};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = name;
  attributes.payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
  attributes.payload.ullValue = number;
  nvtxDomainRangePushEx(domain(), &attributes);
}

BATON_API void baton_range_pop(void) { nvtxDomainRangePop(domain()); }
