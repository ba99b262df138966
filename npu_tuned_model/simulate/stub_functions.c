/* The CANN runtime functions that do something on a machine without an NPU: "device" memory is host memory, streams
 * finish at once. Everything else that torch_npu links against returns 0; stub_libraries.py adds those functions
 * behind this file. Signatures are checked by the compiler against CANN's headers, which the torch_npu wheel carries.
 *
 * NPU_STUB_SOC      name of the chip, Ascend910B3 by default
 * NPU_STUB_DEVICES  number of devices, 1 by default
 * NPU_STUB_MEMORY   bytes of memory per device, 64 GiB by default
 * NPU_STUB_CANN     CANN version, 8.5.0 by default
 * NPU_STUB_REFUSE   set by the simulated NPU: a kernel that is launched here, and so would compute nothing, is an error
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"

enum { DEVICES = 64, STREAMS = 4096, ALIGNMENT = 512 };

/* Stands before every allocation, in ALIGNMENT bytes of its own. */
struct header { size_t size; int device; };
struct event { struct timespec recorded; };

static _Thread_local int32_t current_device = 0;
static size_t used[DEVICES];
static char context, stream_handles[STREAMS];
static int streams = 0;

static const char *text_setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value && *value ? value : otherwise;
}

static int64_t number_setting(const char *name, int64_t otherwise) {
    const char *value = getenv(name);
    return value && *value ? strtoll(value, NULL, 10) : otherwise;
}

static int64_t device_count(void) { return number_setting("NPU_STUB_DEVICES", 1); }
static size_t device_memory(void) { return (size_t)number_setting("NPU_STUB_MEMORY", (int64_t)64 << 30); }

/* devices and versions */

const char *aclrtGetSocName() { return text_setting("NPU_STUB_SOC", "Ascend910B3"); }

aclError aclsysGetVersionStr(char *package, char *version) {
    strcpy(version, text_setting("NPU_STUB_CANN", "8.5.0"));
    return ACL_SUCCESS;
}

aclError aclsysGetCANNVersion(aclCANNPackageName package, aclCANNPackageVersion *version) {
    memset(version, 0, sizeof *version);
    return aclsysGetVersionStr(NULL, version->version);
}

aclError aclrtGetDeviceCount(uint32_t *count) { *count = (uint32_t)device_count(); return ACL_SUCCESS; }
aclError aclrtGetDevice(int32_t *device) { *device = current_device; return ACL_SUCCESS; }

aclError aclrtSetDevice(int32_t device) {
    if (device < 0 || device >= DEVICES || device >= device_count()) return ACL_ERROR_INVALID_PARAM;
    current_device = device;
    return ACL_SUCCESS;
}

aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t *const logic) { *logic = user; return ACL_SUCCESS; }

aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
    *can = device != peer;
    return ACL_SUCCESS;
}

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
    if (flags) *flags = 0;
    *active = device == current_device;
    return ACL_SUCCESS;
}

aclError aclrtGetCurrentContext(aclrtContext *out) { *out = &context; return ACL_SUCCESS; }
aclError aclrtCreateContext(aclrtContext *out, int32_t device) { *out = &context; return ACL_SUCCESS; }
aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) { *value = 0; return ACL_SUCCESS; }
size_t aclGetCompileoptSize(aclCompileOpt option) { return 64; }

aclError aclGetCompileopt(aclCompileOpt option, char *value, size_t length) {
    if (length) *value = 0;
    return ACL_SUCCESS;
}

/* memory */

aclError aclrtMalloc(void **out, size_t size, aclrtMemMallocPolicy policy) {
    size_t whole = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (used[current_device] + whole > device_memory()) return ACL_ERROR_BAD_ALLOC;
    char *block = aligned_alloc(ALIGNMENT, whole + ALIGNMENT);
    if (!block) return ACL_ERROR_BAD_ALLOC;
    *(struct header *)block = (struct header){whole, current_device};
    __atomic_add_fetch(&used[current_device], whole, __ATOMIC_RELAXED);
    *out = block + ALIGNMENT;
    return ACL_SUCCESS;
}

aclError aclrtMallocAlign32(void **out, size_t size, aclrtMemMallocPolicy policy) {
    return aclrtMalloc(out, size, policy);
}

aclError aclrtFree(void *pointer) {
    if (!pointer) return ACL_SUCCESS;
    struct header *block = (struct header *)((char *)pointer - ALIGNMENT);
    __atomic_sub_fetch(&used[block->device], block->size, __ATOMIC_RELAXED);
    free(block);
    return ACL_SUCCESS;
}

aclError aclrtMallocHost(void **out, size_t size) {
    *out = aligned_alloc(ALIGNMENT, (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    return *out ? ACL_SUCCESS : ACL_ERROR_BAD_ALLOC;
}

aclError aclrtMallocHostWithCfg(void **out, uint64_t size, aclrtMallocConfig *config) {
    return aclrtMallocHost(out, size);
}

aclError aclrtFreeHost(void *pointer) { free(pointer); return ACL_SUCCESS; }

aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t count, aclrtMemcpyKind kind) {
    if (count > room) return ACL_ERROR_INVALID_PARAM;
    memmove(to, from, count);
    return ACL_SUCCESS;
}

aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t count, aclrtMemcpyKind kind,
                          aclrtStream stream) {
    return aclrtMemcpy(to, room, from, count, kind);
}

aclError aclrtMemcpyAsyncWithCondition(void *to, size_t room, const void *from, size_t count, aclrtMemcpyKind kind,
                                       aclrtStream stream) {
    return aclrtMemcpy(to, room, from, count, kind);
}

aclError aclrtMemset(void *to, size_t room, int32_t value, size_t count) {
    if (count > room) return ACL_ERROR_INVALID_PARAM;
    memset(to, value, count);
    return ACL_SUCCESS;
}

aclError aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t count, aclrtStream stream) {
    return aclrtMemset(to, room, value, count);
}

aclError aclrtGetMemInfo(aclrtMemAttr attribute, size_t *unused, size_t *total) {
    *total = device_memory();
    *unused = *total - used[current_device];
    return ACL_SUCCESS;
}

/* kernels: there are none */

aclError aclopCompileAndExecute(const char *type, int input_count, const aclTensorDesc *const input_descriptions[],
                                const aclDataBuffer *const inputs[], int output_count,
                                const aclTensorDesc *const output_descriptions[], aclDataBuffer *const outputs[],
                                const aclopAttr *attributes, aclopEngineType engine, aclopCompileType flag,
                                const char *path, aclrtStream stream) {
    if (!getenv("NPU_STUB_REFUSE")) return ACL_SUCCESS;
    fprintf(stderr, "the simulated NPU has no kernel %s: it was launched past the simulation\n", type);
    return ACL_ERROR_OP_NOT_FOUND;
}

/* streams and events: work is done when it is asked for, so all of it is always finished */

aclError aclrtCreateStream(aclrtStream *out) {
    *out = &stream_handles[__atomic_fetch_add(&streams, 1, __ATOMIC_RELAXED) % STREAMS];
    return ACL_SUCCESS;
}

aclError aclrtCreateStreamWithConfig(aclrtStream *out, uint32_t priority, uint32_t flag) {
    return aclrtCreateStream(out);
}

aclError aclrtStreamGetId(aclrtStream stream, int32_t *id) {
    *id = (int32_t)((char *)stream - stream_handles);
    return ACL_SUCCESS;
}

aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status) {
    *status = ACL_STREAM_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

aclError aclrtCreateEvent(aclrtEvent *out) {
    *out = calloc(1, sizeof(struct event));
    return *out ? ACL_SUCCESS : ACL_ERROR_BAD_ALLOC;
}

aclError aclrtCreateEventWithFlag(aclrtEvent *out, uint32_t flag) { return aclrtCreateEvent(out); }
aclError aclrtCreateEventExWithFlag(aclrtEvent *out, uint32_t flag) { return aclrtCreateEvent(out); }
aclError aclrtDestroyEvent(aclrtEvent event) { free(event); return ACL_SUCCESS; }

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
    clock_gettime(CLOCK_MONOTONIC, &((struct event *)event)->recorded);
    return ACL_SUCCESS;
}

aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status) {
    *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status) {
    *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t *microseconds) {
    struct timespec at = ((struct event *)event)->recorded;
    *microseconds = (uint64_t)at.tv_sec * 1000000 + (uint64_t)at.tv_nsec / 1000;
    return ACL_SUCCESS;
}

aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end) {
    struct timespec from = ((struct event *)start)->recorded, to = ((struct event *)end)->recorded;
    *milliseconds = (float)((double)(to.tv_sec - from.tv_sec) * 1e3 + (double)(to.tv_nsec - from.tv_nsec) / 1e6);
    return ACL_SUCCESS;
}
