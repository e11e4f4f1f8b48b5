// Control functions of the stand-in libcuda.so.1, exported next to the cu* functions. Plain C
// types, so that Python can call them by ctypes.
//
// What the stand-in is: the driver functions that this project calls, over memfd and mmap. A device
// pointer is an ordinary address that the test may read. Granularity 2 MiB unless told otherwise,
// two devices. What it is for: every rule of the documentation that we know of is checked, and a
// broken rule is a *violation*: printed to stderr, counted, and answered with an error. What it
// cannot show: a GPU's timing, its real error codes, or its behaviour where the documentation is
// silent. New chunks hold the byte 0xCD at both ends, so that a missing zero-fill is seen.
//
// Thread-safety: every function may be called from any thread.
//
// Environment, read when the library is first used, and again by standin_cuda_reset():
//   STANDIN_CUDA_CAPACITY_BYTES  memory of each device (default 8 GiB, backed only where touched)
//   STANDIN_CUDA_GRANULARITY_BYTES  of all memory calls (default 2 MiB)
//   STANDIN_CUDA_DEVICES         number of devices (default 2)
//   STANDIN_CUDA_FAIL            "cuMemMap:3:2,cuMemCreate:1:999": as standin_cuda_fail()
//   STANDIN_CUDA_REPORT          "1": print what is still alive at exit; "fail": also _exit(97)
//   when
//                                anything is alive or a rule was broken
//   STANDIN_CUDA_ABORT           "1": abort() at the first violation, for a backtrace
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Injects `code` into the nth call of `function` (unsuffixed name) from now on; nth 0: every call.
void standin_cuda_fail(const char* function, int nth, int code);
// Removes injected failures, counts, violations and overrides, and reads the environment again.
// Live objects stay.
void standin_cuda_reset(void);
// Calls of `function` since the last reset, failed ones included; NULL: of all functions.
uint64_t standin_cuda_calls(const char* function);

void standin_cuda_set_capacity(uint64_t bytes_per_device);
// A power of two, at least a page. Small ones let a test of the layers above use small chunks. Only
// while nothing is alive.
void standin_cuda_set_granularity(uint64_t bytes);
void standin_cuda_set_devices(int num_devices);  // at most 2; with 0, cuInit says "no device"
void standin_cuda_set_attribute(int attribute, int value);  // of all devices
void standin_cuda_forget_init(void);                        // as if cuInit had never been called
// Nonzero: cuMemUnmap takes exactly one mapping a call, the narrow reading of the documentation.
void standin_cuda_set_single_unmap(int on);
// How long a synchronise call waits for kernels before it is a violation (default 20000).
void standin_cuda_set_sync_timeout_ms(int milliseconds);
void standin_cuda_set_quiet(int on);  // no violation text on stderr

// Broken rules since the last reset, and the text of the last one ("" when there is none; valid
// until the next call on this thread).
uint64_t standin_cuda_violations(void);
const char* standin_cuda_last_violation(void);

// What is alive now. `kind`: "reservation", "allocation" (physical memory), "handle" (not released
// yet), "mapping", "context" (retains of primary contexts), "stream", "event", "bytes"; NULL: all
// but bytes.
uint64_t standin_cuda_live(const char* kind);

// A kernel that is launched on `stream` (a CUstream; 0: the default stream of device 0) and touches
// [addr, addr + bytes) until it is ended. While it is in flight, map, unmap, set_access and free on
// these addresses are violations, and so are unordered copies and fills into the same physical
// bytes. Returns its id, or 0 (a violation) when the range is not readable.
uint64_t standin_cuda_begin_kernel(uint64_t stream, uint64_t addr, uint64_t bytes);
void standin_cuda_end_kernel(uint64_t kernel);
uint64_t standin_cuda_running_kernels(void);

// One launch, over when this returns: `reads` and `writes` are pairs of address and bytes. A
// violation, and 0, when a range is not mapped for that, or when CUDA's rule of virtual aliasing is
// broken: a byte that the launch writes through one address is read or written by it through
// another, or is touched by a kernel in flight.
int standin_cuda_launch(const uint64_t* reads, uint64_t num_reads, const uint64_t* writes,
                        uint64_t num_writes);

#ifdef __cplusplus
}
#endif
