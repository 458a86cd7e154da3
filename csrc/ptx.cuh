// Every line of inline PTX of this project. One wrapper is one instruction; loops and choices stay with the callers.
//
// Names in brackets are sections of the PTX ISA manual. Everything here needs sm_90; wgmma and setmaxnreg need sm_90a.
// A "memory" clobber stands where the compiler must not move loads and stores across the instruction.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

namespace ptx {

// ---------------------------------------------------------------------------------------------- registers and threads

// Give registers of this warpgroup back to the CTA's pool. [setmaxnreg] All four warps call it.
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
    static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256, "setmaxnreg: a multiple of 8 in [24, 256]");
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(REGISTERS));
}

// Take registers from the CTA's pool; blocks until they are there. [setmaxnreg] All four warps call it.
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
    static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256, "setmaxnreg: a multiple of 8 in [24, 256]");
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(REGISTERS));
}

// The thread's index, read anew at each call. [%tid] Volatile on purpose: what is derived from it is computed where it
// is used, so that addresses of rare steps do not occupy registers throughout a main loop.
__device__ __forceinline__ u32 tid_x() {
    u32 tid;
    asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(tid)::"memory");
    return tid;
}

// ----------------------------------------------------------------------------------------------------------- mbarriers

// Set a barrier to its first phase with `arrivals` expected. [mbarrier.init] By one thread, before anybody uses it.
__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Make initialised barriers visible to all proxies. [fence.mbarrier_init] Followed by a CTA barrier.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

// Count one arrival; releases the thread's earlier accesses (of the CTA's memory) to whoever waits. [mbarrier.arrive]
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}\n" ::"r"(barrier) : "memory");
}

// True when the phase of this parity has completed; acquires. May suspend for a short time. [mbarrier.try_wait]
__device__ __forceinline__ bool mbarrier_try_wait(u32 barrier, u32 parity) {
    u32 is_complete;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(is_complete)
        : "r"(barrier), "r"(parity)
        : "memory");
    return is_complete != 0;
}

// ------------------------------------------------------------------------------------------------------------- proxies

// Order earlier writes to shared memory (st, stmatrix, completed cp.async) before later reads by wgmma: this thread's own
// writes and those that it acquired at a barrier. [fence.proxy.async] By the writing thread before the barrier that hands
// the data over (P), or by the reading one behind it (K, Q): invariant 4 of sparse_mla_prefill.cu.
__device__ __forceinline__ void fence_proxy_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// -------------------------------------------------------------------------------------------------------- global memory

// An L2 policy that evicts what it marks first. [createpolicy] For what is copied of Q, which is read once.
__device__ __forceinline__ u64 createpolicy_evict_first() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
    return policy;
}

// An L2 policy that evicts what it marks last. [createpolicy] For the KV rows, which other queries select again.
__device__ __forceinline__ u64 createpolicy_evict_last() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;\n" : "=l"(policy));
    return policy;
}

// Copy 16 bytes to shared memory asynchronously, or write 16 zeros and read nothing when `gate` is below 0. [cp.async]
// The shared address must not be a sum of a per-thread and a uniform register: ptxas 13.0 then encodes the form with a
// cache policy badly, and it traps as an illegal instruction (measured 2026-11-30, H200).
__device__ __forceinline__ void cp_async_16(u32 shared, const void* source, int gate, u64 policy) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "setp.lt.s32 p, %2, 0;\n"
        "cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, p, %3;\n}\n" ::"r"(shared),
        "l"(source), "r"(gate), "l"(policy)
        : "memory");
}

// Ask for the cache line of an address in L2; nothing waits for it. [prefetch]
__device__ __forceinline__ void prefetch_l2(const void* source) {
    asm volatile("prefetch.global.L2 [%0];\n" ::"l"(source) : "memory");
}

// The same, for lines that are to be evicted last.
__device__ __forceinline__ void prefetch_l2_evict_last(const void* source) {
    asm volatile("prefetch.global.L2::evict_last [%0];\n" ::"l"(source) : "memory");
}

// Let the barrier count one arrival of this thread once its earlier cp.async have written. [cp.async.mbarrier.arrive]
// noinc: the arrival is one of those that the barrier was initialised with.
__device__ __forceinline__ void cp_async_mbarrier_arrive(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(barrier) : "memory");
}

// Wait until all earlier cp.async of this thread have written. [cp.async.wait_all]
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;\n" ::: "memory"); }

// ---------------------------------------------------------------------------------------- fragments and shared memory

// Load four 8x8 matrices of 16-bit pieces; lane l gives the row address l%8 of matrix l/8. [ldmatrix]
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Load four 8x8 matrices of 16-bit pieces, each transposed; lane l gives the row address l%8 of matrix l/8. [ldmatrix]
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Store four 8x8 matrices of 16-bit pieces; lane l gives the row address l%8 of matrix l/8. [stmatrix]
__device__ __forceinline__ void stmatrix_x4(u32 address, u32 r0, u32 r1, u32 r2, u32 r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(r0), "r"(r1),
                 "r"(r2), "r"(r3)
                 : "memory");
}

// Pick four bytes of the eight in (a, b); nibble n of SELECTOR names the byte that becomes byte n. [prmt]
template <u32 SELECTOR>
__device__ __forceinline__ u32 prmt(u32 a, u32 b) {
    u32 picked;
    asm volatile("prmt.b32 %0, %1, %2, %3;\n" : "=r"(picked) : "r"(a), "r"(b), "n"(SELECTOR));
    return picked;
}

// ---------------------------------------------------------------------------------------------------------- arithmetic

// 2^x, error below 2^-22 relative; -inf gives 0. [ex2]
__device__ __forceinline__ float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

// log2 x. [lg2]
__device__ __forceinline__ float lg2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

// Two floats to e4m3, round to nearest even, +-448 at most, NaN kept; `low` in the low byte. [cvt]
__device__ __forceinline__ u16 cvt_e4m3x2(float low, float high) {
    u16 packed;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;\n" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}

// Join two 16-bit halves. [mov] As PTX, so that ptxas merges it into the conversion that made them.
__device__ __forceinline__ u32 pack_b16x2(u16 low, u16 high) {
    u32 packed;
    asm("mov.b32 %0, {%1, %2};\n" : "=r"(packed) : "h"(low), "h"(high));
    return packed;
}

// Two floats to bf16, round to nearest even; `low` in the low half. [cvt]
__device__ __forceinline__ u32 cvt_bf16x2(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// --------------------------------------------------------------------------------------------------------------- wgmma

// Order register and shared-memory accesses of the warpgroup before its next wgmma. [wgmma.fence]
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }

// Close the group of wgmma issued so far. [wgmma.commit_group]
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }

// Wait until at most PENDING groups are in flight. [wgmma.wait_group]
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    static_assert(PENDING >= 0 && PENDING <= 7, "wgmma.wait_group: 0 to 7 groups");
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(PENDING) : "memory");
}

// No instruction: tells the compiler that the value changes here. So it neither moves reads of a register of a wgmma in
// flight up, nor computes an address later than it is written.
__device__ __forceinline__ void hold(float& value) { asm volatile("" : "+f"(value)::"memory"); }
__device__ __forceinline__ void hold(u32& value) { asm volatile("" : "+r"(value)::"memory"); }
__device__ __forceinline__ void hold(u64& value) { asm volatile("" : "+l"(value)::"memory"); }

#define ACCUMULATOR_32                                                        \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define OPERANDS_32(constraint, d)                                                                                        \
    constraint(d[0]), constraint(d[1]), constraint(d[2]), constraint(d[3]), constraint(d[4]), constraint(d[5]),           \
        constraint(d[6]), constraint(d[7]), constraint(d[8]), constraint(d[9]), constraint(d[10]), constraint(d[11]),     \
        constraint(d[12]), constraint(d[13]), constraint(d[14]), constraint(d[15]), constraint(d[16]), constraint(d[17]), \
        constraint(d[18]), constraint(d[19]), constraint(d[20]), constraint(d[21]), constraint(d[22]), constraint(d[23]), \
        constraint(d[24]), constraint(d[25]), constraint(d[26]), constraint(d[27]), constraint(d[28]), constraint(d[29]), \
        constraint(d[30]), constraint(d[31])

// D = A B for 64 x 64 x 32 e4m3 with fp32 D; A from registers (fragment map: layout.cuh), B from shared memory by
// descriptor, K-major. [wgmma.mma_async]
__device__ __forceinline__ void wgmma_overwrite(float (&d)[32], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " ACCUMULATOR_32
                 ", {%32, %33, %34, %35}, %36, 0, 1, 1;\n"
                 : OPERANDS_32("=f", d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// D += A B, the same shapes.
__device__ __forceinline__ void wgmma_accumulate(float (&d)[32], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " ACCUMULATOR_32
                 ", {%32, %33, %34, %35}, %36, 1, 1, 1;\n"
                 : OPERANDS_32("+f", d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// D += A B, the same shapes; A from shared memory too, K-major.
__device__ __forceinline__ void wgmma_accumulate_shared(float (&d)[32], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " ACCUMULATOR_32 ", %32, %33, 1, 1, 1;\n"
                 : OPERANDS_32("+f", d)
                 : "l"(a), "l"(b));
}

#undef ACCUMULATOR_32
#undef OPERANDS_32

}  // namespace ptx
