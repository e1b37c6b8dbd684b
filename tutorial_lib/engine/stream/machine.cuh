// What the whole-step kernel asks of a Hopper GPU, one function for each instruction it needs and C++ has no word for.
// `step.cu` is written in these words only; tests replace this file by one that emulates them on a CPU.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__
#define METHOD __device__ __forceinline__
#define CONSTANT __constant__ const
#define CONSTEXPR __host__ __device__ constexpr
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, 1)
#define PARAMETERS const __grid_constant__ Params

// From here on the compiler takes v for a new value: what follows from it is not kept in registers from before.
DEVICE void forget(int& v) { asm volatile("" : "+r"(v)); }

DEVICE int thread_index() { return threadIdx.x; }
DEVICE int block_index() { return blockIdx.x; }

extern __shared__ __align__(1024) u8 shared_memory[];
DEVICE u8* shared_base() { return shared_memory; }
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ------------------------------------------------------------------------------------------- waiting, and not for ever

DEVICE u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

DEVICE u64 cycles() {  // of this processor
  u64 t;
  asm volatile("mov.u64 %0, %clock64;" : "=l"(t));
  return t;
}

DEVICE int read_volatile(const int* p) {
  int v;
  asm volatile("ld.volatile.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// Poll until `test()`; false if it took too long, which `trouble` then says, or if another thread gave up.
template <class Test>
DEVICE bool await(Test test, int* trouble, int what, const int* phase, int block, int which) {
  u32 since = 0;
  for (u32 polls = 1; !test(); polls++) {
    if (polls & 1023) continue;
    if (read_volatile(trouble)) return false;
    const u32 now = (u32)(nanoseconds() >> 20) | 1;  // milliseconds, nearly
    if (!since) since = now;
    if (now - since < LONGEST_WAIT_MS) continue;
    if (atomicCAS(trouble, 0, what) == 0) {
      trouble[1] = *phase;
      trouble[2] = block;
      trouble[3] = which;
    }
    return false;
  }
  return true;
}

DEVICE void pause_us(int us) {
  for (int i = 0; i < us; i++) __nanosleep(1000);
}

// ------------------------------------------------------------------------------------------- barriers of shared memory

DEVICE void barrier_init(u32 bar, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(arrivals));
}
DEVICE void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(bar) : "memory"); }
DEVICE void barrier_arrive_expecting(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE bool barrier_passed(u32 bar, u32 parity) {
  u32 ok;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(ok)
               : "r"(bar), "r"(parity)
               : "memory");
  return ok;
}
DEVICE void sync_warp() { __syncwarp(); }
DEVICE void sync_block() { __syncthreads(); }
template <int ID, int COUNT>
DEVICE void sync_some() {
  asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(COUNT) : "memory");
}

// --------------------------------------------------------------------------------------------------------- bulk copies

DEVICE u64 read_once_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEVICE void copy_once(u32 to, const u8* from, u32 bytes, u32 bar, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(bar), "l"(policy)
      : "memory");
}
DEVICE void copy_shared(u32 to, const u8* from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(bar)
               : "memory");
}
// Between ordinary accesses and those of bulk copies and tensor cores: of shared memory, of global memory.
DEVICE void order_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void order_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ----------------------------------------------------------------------------------------- between processors (via L2)

DEVICE void add_release(u32* counter) {
  asm volatile("fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
DEVICE u32 read_acquire(const u32* counter) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory");
  return v;
}
DEVICE void raise_to(u64* at, u64 value) { atomicMax(at, value); }
DEVICE void raise_shared(u32* at, u32 value) { atomicMax(at, value); }

// What other processors wrote during this launch is read past the L1 cache.
DEVICE float far_float(const float* p) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}
DEVICE float4 far_float4(const void* p) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
DEVICE uint4 far_words(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
DEVICE void bring_near(const void* p) {  // a line of 128 bytes into L2
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory");
}
DEVICE u64 far_u64(const u64* p) {
  u64 v;
  asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void put_far_float(float* p, float v) { asm volatile("st.global.cg.f32 [%0], %1;" ::"l"(p), "f"(v) : "memory"); }
DEVICE void put_far_float2(float* p, float a, float b) {
  asm volatile("st.global.cg.v2.f32 [%0], {%1, %2};" ::"l"(p), "f"(a), "f"(b) : "memory");
}

// ---------------------------------------------------------------------------------------------- between a warp's lanes

DEVICE float shuffle(float v, int lanes) { return __shfl_xor_sync(~0u, v, lanes); }
DEVICE u32 shuffle(u32 v, int lanes) { return __shfl_xor_sync(~0u, v, lanes); }
DEVICE u32 first_lane(u32 v) { return __shfl_sync(~0u, v, 0); }

// ------------------------------------------------------------------------------------------------------------- numbers

DEVICE float bf16_to_float(u16 v) { return __uint_as_float((u32)v << 16); }
DEVICE u16 float_to_bf16(float v) {
  u16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
  return r;
}
DEVICE u32 two_bf16(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
DEVICE u16 two_fp8(float low, float high) {  // e4m3, saturated
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
}
DEVICE u32 two_fp8_to_bf16(u16 v) {  // exact: bf16 holds every e4m3
  u32 h;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h) : "h"(v));
  float low, high;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(low), "=f"(high) : "r"(h));
  return two_bf16(low, high);
}
// One instruction each, right to about 22 bits: the exact ones have branches for cases that cannot come.
DEVICE float inverse(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
DEVICE float inverse_root(float v) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
DEVICE float power_of_two(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
DEVICE u32 bits_of(float v) { return __float_as_uint(v); }
DEVICE float float_of(u32 v) { return __uint_as_float(v); }

// ------------------------------------------------------------------------------------- tensor cores: a warp's products

// Four 8 x 8 matrices of bf16 from shared memory, whose rows lie at the addresses of lanes 0-7, 8-15, 16-23 and 24-31.
// Lane 4 g + t gets of each the elements (g, 2t) and (g, 2t + 1); transposed: (2t, g) and (2t + 1, g).
DEVICE void load_matrices(u32* r, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
DEVICE void load_transposed(u32* r, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
// c [16 x 8] += a [16 x 16] b [16 x 8], bf16 in, float32 out.
DEVICE void multiply_16x8(float* c, const u32* a, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ------------------------------------------------------------------------------- tensor cores: products of a warpgroup

// Where a matrix lies in shared memory, without swizzle: core matrices of 8 rows x 16 bytes, `along_k` bytes from one
// to the next along K, `along_rows` to the next 8 rows.
DEVICE u64 descriptor(u32 address, u32 along_k, u32 along_rows) {
  return (u64)((address >> 4) & 0x3fff) | (u64)(along_k >> 4) << 16 | (u64)(along_rows >> 4) << 32;
}
DEVICE u64 descriptor_step(u32 bytes) { return bytes >> 4; }

DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F8(i) F4(i), F4(i + 4)
#define F16(i) F8(i), F8(i + 8)
#define O4(i) "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3])
#define O8(i) O4(i), O4(i + 4)
#define O16(i) O8(i), O8(i + 8)
#define R4 "%0,%1,%2,%3"
#define R8 R4 ",%4,%5,%6,%7"
#define R16 R8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define R24 R16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define R32 R24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA(ADDS, SHAPE, TYPES, REGISTERS, A, B, TAIL, ...)                                             \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " ADDS ", 0; wgmma.mma_async.sync.aligned." SHAPE "." TYPES \
               " {" REGISTERS "}, " A ", " B ", p, 1, 1" TAIL ";}"                                        \
               : __VA_ARGS__                                                                              \
               : "l"(a), "l"(b))
#define OF_TYPE(ADDS, COUNT, REGISTERS, A, B, ...)                                      \
  if constexpr (EIGHT_BITS)                                                             \
    WGMMA(ADDS, "m64n" COUNT "k32", "f32.e4m3.e4m3", REGISTERS, A, B, "", __VA_ARGS__); \
  else                                                                                  \
    WGMMA(ADDS, "m64n" COUNT "k16", "f32.bf16.bf16", REGISTERS, A, B, ", 0, 0", __VA_ARGS__)
#define FIRST_OR_NEXT(COUNT, REGISTERS, A, B, FIRST, NEXT) \
  if constexpr (IS_FIRST) {                                \
    OF_TYPE("0", COUNT, REGISTERS, A, B, FIRST);           \
  } else {                                                 \
    OF_TYPE("1", COUNT, REGISTERS, A, B, NEXT);            \
  }
#define PAIR(X, Y) X, Y

// d [64 x N] = a [64 x 32 bytes] b [32 bytes x N], added to what d holds unless IS_FIRST. Of warp w of the group, lane
// 4 g + t has in d[4 j ...] rows 16 w + g (two) and 16 w + g + 8 (two), columns 8 j + 2 t and the next.
template <int N, bool EIGHT_BITS, bool IS_FIRST>
DEVICE void multiply_64(float* d, u64 a, u64 b) {
  if constexpr (N == 8) {
    FIRST_OR_NEXT("8", R4, "%4", "%5", O4(0), F4(0));
  } else if constexpr (N == 16) {
    FIRST_OR_NEXT("16", R8, "%8", "%9", O8(0), F8(0));
  } else if constexpr (N == 32) {
    FIRST_OR_NEXT("32", R16, "%16", "%17", O16(0), F16(0));
  } else if constexpr (N == 48) {
    FIRST_OR_NEXT("48", R24, "%24", "%25", PAIR(O16(0), O8(16)), PAIR(F16(0), F8(16)));
  } else {
    static_assert(N == 64, "columns of a product");
    FIRST_OR_NEXT("64", R32, "%32", "%33", PAIR(O16(0), O16(16)), PAIR(F16(0), F16(16)));
  }
}

template <int N>
DEVICE void products_wait(float* d) {
#define WAIT(...) asm volatile("wgmma.wait_group.sync.aligned 0;" : __VA_ARGS__::"memory")
  if constexpr (N == 8) {
    WAIT(F4(0));
  } else if constexpr (N == 16) {
    WAIT(F8(0));
  } else if constexpr (N == 32) {
    WAIT(F16(0));
  } else if constexpr (N == 48) {
    WAIT(F16(0), F8(16));
  } else {
    WAIT(F16(0), F16(16));
  }
}
