// Element types, tensor-core and copy instructions that the kernels share. Must never know attention.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "params.h"

// How much of what surrounds a 16-byte copy the L2 fetches along.
#ifndef TT_L2_PREFETCH
#define TT_L2_PREFETCH ".L2::128B"
#endif

namespace tt {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

struct Fp8 {
    unsigned char bits;
};

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The minus infinity of scores. A constant that needs no header of the host's.
__device__ __forceinline__ float minus_inf() { return __int_as_float(0xff800000); }

// An element type of queries, outputs and 16-bit caches.
template <class E>
struct Type;

template <>
struct Type<__nv_bfloat16> {
    static __device__ __forceinline__ unsigned pack(float a, float b) {
        __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
        return *reinterpret_cast<unsigned *>(&v);
    }
    static __device__ __forceinline__ float2 unpack(unsigned x) {
        return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162 *>(&x));
    }
    static __device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
    static __device__ __forceinline__ __nv_bfloat16 narrow(float x) { return __float2bfloat16_rn(x); }
    // d += a (16x16) * b (16x8).
    static __device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    // Four e4m3, to two pairs: bytes 0 and 2, bytes 1 and 3; exact, but kFp8Scale times too small. The bits are shifted
    // into place, which leaves the exponent's bias wrong; here by 2^120, too much to carry along.
    static constexpr float kFp8Scale = 1.0f;
    static __device__ __forceinline__ void from_fp8(unsigned x, unsigned &even, unsigned &odd) {
        const unsigned power = 0x7b807b80u;
        const __nv_bfloat162 scale = *reinterpret_cast<const __nv_bfloat162 *>(&power);
        unsigned bits = ((x << 8) & 0x80008000u) | ((x << 4) & 0x07f007f0u);
        __nv_bfloat162 v = __hmul2(*reinterpret_cast<__nv_bfloat162 *>(&bits), scale);
        even = *reinterpret_cast<unsigned *>(&v);
        bits = (x & 0x80008000u) | ((x >> 4) & 0x07f007f0u);
        v = __hmul2(*reinterpret_cast<__nv_bfloat162 *>(&bits), scale);
        odd = *reinterpret_cast<unsigned *>(&v);
    }
};

template <>
struct Type<__half> {
    static __device__ __forceinline__ unsigned pack(float a, float b) {
        __half2 v = __floats2half2_rn(a, b);
        return *reinterpret_cast<unsigned *>(&v);
    }
    static __device__ __forceinline__ float2 unpack(unsigned x) { return __half22float2(*reinterpret_cast<__half2 *>(&x)); }
    static __device__ __forceinline__ float widen(__half x) { return __half2float(x); }
    static __device__ __forceinline__ __half narrow(float x) { return __float2half_rn(x); }
    static __device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    static constexpr float kFp8Scale = 256.0f;
    static __device__ __forceinline__ void from_fp8(unsigned x, unsigned &even, unsigned &odd) {
        even = ((x << 8) & 0x80008000u) | ((x << 7) & 0x3f803f80u);
        odd = (x & 0x80008000u) | ((x >> 1) & 0x3f803f80u);
    }
};

template <>
struct Type<float> {
    static __device__ __forceinline__ float widen(float x) { return x; }
    static __device__ __forceinline__ float narrow(float x) { return x; }
};

__device__ __forceinline__ unsigned shared_address(const void *p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// 16 bytes from global to shared memory, asynchronously; zeros, and no read, where not `valid`. ONCE: nothing reads them
// again soon, so they may leave the L2 before anything else.
template <bool ONCE>
__device__ __forceinline__ void copy_async16(unsigned to, const void *from, bool valid) {
    int bytes = valid ? 16 : 0;
    if constexpr (ONCE) {
        unsigned long long policy;
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        asm volatile("cp.async.cg.shared.global.L2::cache_hint" TT_L2_PREFETCH " [%0], [%1], 16, %2, %3;" ::"r"(to),
                     "l"(from), "r"(bytes), "l"(policy)
                     : "memory");
    } else {
        asm volatile("cp.async.cg.shared.global" TT_L2_PREFETCH " [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                     : "memory");
    }
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ void load_matrix4(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void load_matrix4_transposed(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// The 8x8 matrix of 16-bit elements that a warp holds, two a lane, transposed.
__device__ __forceinline__ unsigned transpose_matrix(unsigned x) {
    unsigned y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

template <bool Condition, class A, class B>
struct Choose {
    using type = A;
};
template <class A, class B>
struct Choose<false, A, B> {
    using type = B;
};
template <class A, class B>
struct IsSame {
    static constexpr bool value = false;
};
template <class A>
struct IsSame<A, A> {
    static constexpr bool value = true;
};

template <class T>
struct IsFp8 {
    static constexpr bool value = false;
};
template <>
struct IsFp8<Fp8> {
    static constexpr bool value = true;
};

}  // namespace tt
