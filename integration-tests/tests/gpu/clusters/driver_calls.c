/* Appends a line "THREAD FUNCTION" to the file LOG for each call of the functions below. A process loads this library by
 * LD_PRELOAD. Baton and the CUDA runtime find driver functions by dlsym and cuGetProcAddress, which return wrappers here. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

/* Calls that can wait for the GPU or for other calls, and two calls that only enqueue. */
#define FUNCTIONS(each) \
    each(cuCtxSynchronize) each(cuEventSynchronize) each(cuStreamSynchronize) \
    each(cuMemAlloc_v2) each(cuMemAllocPitch_v2) each(cuMemFree_v2) each(cuMemAllocManaged) \
    each(cuMemAllocHost_v2) each(cuMemHostAlloc) each(cuMemFreeHost) \
    each(cuMemHostRegister_v2) each(cuMemHostUnregister) \
    each(cuMemcpy) each(cuMemcpyHtoD_v2) each(cuMemcpyDtoH_v2) each(cuMemcpyDtoD_v2) each(cuMemcpy2D_v2) \
    each(cuEventRecord) each(cuGraphLaunch)

/* A driver function. Unused arguments are passed on and ignored. */
typedef int (*Function)(void *, void *, void *, void *, void *, void *);
typedef int (*Getter)(const char *, void **, int, unsigned long long, int *);

static int file = -1;
static Getter getter;

__attribute__((constructor)) static void open_file(void) {
    file = open(LOG, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static void note(const char *function) {
    char thread[16] = "", line[80];
    prctl(PR_GET_NAME, thread);
    int length = snprintf(line, sizeof line, "%s %s\n", thread, function);
    if (write(file, line, length) != length)
        perror("driver_calls");
}

#define WRAPPER(name) \
    static Function name##_found; \
    static int name##_noted(void *a, void *b, void *c, void *d, void *e, void *f) { \
        note(#name); \
        return name##_found(a, b, c, d, e, f); \
    }
FUNCTIONS(WRAPPER)

static int get(const char *name, void **function, int version, unsigned long long flags, int *status);

/* Returns the wrapper of the driver function `name`, or `found`. cuGetProcAddress omits the version in names. */
static void *wrapped(const char *name, void *found) {
#define WRAP(known) \
    if (!strcmp(name, #known) || (!strncmp(#known, name, strlen(name)) && !strcmp(#known + strlen(name), "_v2"))) { \
        known##_found = (Function)found; \
        return (void *)known##_noted; \
    }
    FUNCTIONS(WRAP)
    return found;
}

static int get(const char *name, void **function, int version, unsigned long long flags, int *status) {
    const unsigned long long per_thread_streams = 2;
    int result = getter(name, function, version, flags, status);
    if (result == 0 && function && *function && !(flags & per_thread_streams))
        *function = *function == (void *)getter ? (void *)get : wrapped(name, *function);
    return result;
}

void *dlsym(void *library, const char *name) {
    static void *(*next)(void *, const char *);
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"};
    for (size_t i = 0; !next && i < sizeof versions / sizeof *versions; i++)
        next = dlvsym(RTLD_NEXT, "dlsym", versions[i]);
    void *found = next(library, name);
    if (!found)
        return NULL;
    if (!strcmp(name, "cuGetProcAddress_v2")) {
        getter = (Getter)found;
        return (void *)get;
    }
    return wrapped(name, found);
}
