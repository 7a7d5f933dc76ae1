// Traces every kernel that a program runs, kernels of replayed graphs included, from CUPTI's activity records. When the
// program ends, the library writes start and end of each kernel to the file that BATON_KERNEL_TRACE names. With
// NVTX_INJECTION64_PATH=libcupti.so.13 the file also has the NVTX ranges of the program's threads, in lines that
// begin with #. The driver loads the library into any program that is started with
// CUDA_INJECTION64_PATH=libkernel_trace.so. kernel_idle.py evaluates the file.
//
//   g++ -O2 -shared -fPIC -I$CUDA/include -I$CUDA/extras/CUPTI/include -L$CUDA/extras/CUPTI/lib64
//       -DKERNEL=CUpti_ActivityKernel<the newest in cupti_activity.h> -o libkernel_trace.so
//       kernel_trace.cpp -lcupti
#include <cupti.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>

namespace {

constexpr size_t BUFFER_BYTES = 8u << 20;
std::mutex file_mutex;
FILE *file = nullptr;

void CUPTIAPI give_buffer(uint8_t **buffer, size_t *bytes, size_t *records_max) {
    *buffer = static_cast<uint8_t *>(std::aligned_alloc(64, BUFFER_BYTES));
    *bytes = *buffer ? BUFFER_BYTES : 0;
    *records_max = 0;
}

void CUPTIAPI take_buffer(CUcontext, uint32_t, uint8_t *buffer, size_t, size_t valid) {
    std::lock_guard<std::mutex> lock(file_mutex);
    CUpti_Activity *record = nullptr;
    while (file && cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
        if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
            const auto *kernel = reinterpret_cast<const KERNEL *>(record);
            std::fprintf(file, "%llu %llu %s\n", (unsigned long long)kernel->start,
                         (unsigned long long)kernel->end, kernel->name);
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MARKER) {
            // Start and end of a range are separate records; the end has no name.
            const auto *marker = reinterpret_cast<const CUpti_ActivityMarker2 *>(record);
            std::fprintf(file, "# %llu %u %s\n", (unsigned long long)marker->timestamp, marker->id,
                         marker->flags & CUPTI_ACTIVITY_FLAG_MARKER_START ? marker->name : "");
        }
    }
    std::free(buffer);
}

void finish() {
    cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    std::lock_guard<std::mutex> lock(file_mutex);
    if (file) std::fclose(file);
    file = nullptr;
}

}  // namespace

// The driver calls this function after its initialization.
extern "C" __attribute__((visibility("default"))) int InitializeInjection() {
    const char *path = std::getenv("BATON_KERNEL_TRACE");
    file = path ? std::fopen(path, "w") : nullptr;
    if (!file) {
        std::fprintf(stderr, "kernel trace: BATON_KERNEL_TRACE names no file that can be written\n");
        return 0;
    }
    const bool is_on = cuptiActivityRegisterCallbacks(give_buffer, take_buffer) == CUPTI_SUCCESS &&
                       cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) == CUPTI_SUCCESS;
    if (std::getenv("NVTX_INJECTION64_PATH")) cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MARKER);
    if (!is_on) std::fprintf(stderr, "kernel trace: CUPTI does not record\n");
    std::atexit(finish);
    return is_on ? 1 : 0;
}
