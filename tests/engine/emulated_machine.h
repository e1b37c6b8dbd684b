// The words of `stream/machine.cuh` on a CPU: every CUDA thread is a coroutine, every block has its shared memory, and
// a scheduler picks who goes on in an order that a seed decides. Bulk copies arrive some time later, and tensor cores
// read shared memory through the same descriptors. When nobody can go on, one who waits for a barrier "took too long".

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct float4 {
  float x, y, z, w;
};
struct uint2 {
  u32 x, y;
};
struct uint4 {
  u32 x, y, z, w;
};

#define DEVICE static inline
#define METHOD inline
#define CONSTANT static const
#define CONSTEXPR constexpr
#define KERNEL static void
#define PARAMETERS const Params&

namespace emulated {

struct Barrier {
  u32 expected = 0, pending = 0;
  long long bytes = 0;
  u64 phase = 0;
  bool is_made = false;
  void settle() {
    if (pending == 0 && bytes == 0) {
      phase++;
      pending = expected;
    }
  }
};

struct Warp {
  u64 slots[32], results[2][32];
  int arrived = 0;
  u64 generation = 0;
};

struct Named {
  int arrived = 0;
  u64 generation = 0;
};

struct Copy {
  u32 to;
  const u8* from;
  u32 bytes, bar;
};

struct Block {
  std::vector<u8> memory;
  std::vector<Warp> warps;
  Named named[4];
  std::vector<Copy> copies;
  int running = 0;
};

struct Fibre {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Block* block;
  int thread, index;
  bool is_done = false, may_give_up = false, is_too_late = false;
  std::function<bool()> ready;
};

static std::vector<Block> blocks;
static std::vector<Fibre> fibres;
static Fibre* current;
static ucontext_t scheduler;
static const Params* parameters;
static u64 switches;

// Leave until ready(). False if, with everybody stuck, this one was told that it took too long.
static bool leave(std::function<bool()> ready, bool may_give_up = false) {
  Fibre* self = current;
  self->ready = std::move(ready);
  self->may_give_up = may_give_up;
  self->is_too_late = false;
  switches++;
  swapcontext(&self->context, &scheduler);
  return !self->is_too_late;
}

static Barrier& barrier_at(u32 bar) {
  // 8 bytes of shared memory name an entry of this table
  static std::vector<Barrier> table;
  u64 index;
  memcpy(&index, current->block->memory.data() + bar, 8);
  if (index == 0 || index > table.size()) {
    table.emplace_back();
    index = table.size();
    memcpy(current->block->memory.data() + bar, &index, 8);
  }
  return table[index - 1];
}

// All lanes of a warp give a word and get everybody's.
static const u64* exchange(u64 mine) {
  Fibre* self = current;
  Warp& warp = self->block->warps[self->thread / 32];
  const u64 generation = warp.generation;
  warp.slots[self->thread % 32] = mine;
  if (++warp.arrived == 32) {
    memcpy(warp.results[generation % 2], warp.slots, sizeof warp.slots);
    warp.arrived = 0;
    warp.generation++;
  } else {
    Warp* its = &warp;
    leave([its, generation] { return its->generation != generation; });
  }
  return warp.results[generation % 2];
}

static void finish_copy(Block& block, const Copy& copy, Barrier& bar) {
  memcpy(block.memory.data() + copy.to, copy.from, copy.bytes);
  bar.bytes -= copy.bytes;
  bar.settle();
}

}  // namespace emulated

DEVICE void forget(int&) {}
DEVICE int thread_index() { return emulated::current->thread; }
DEVICE int block_index() { return (int)(emulated::current->block - emulated::blocks.data()); }
DEVICE u8* shared_base() { return emulated::current->block->memory.data(); }
DEVICE u32 shared_address(const void* p) { return (u32)((const u8*)p - shared_base()); }

DEVICE u64 nanoseconds() { return emulated::switches * 10; }
DEVICE u64 cycles() { return emulated::switches * 20; }
DEVICE int read_volatile(const int* p) { return *p; }
template <class Test>
DEVICE bool await(Test test, int* trouble, int what, const int* phase, int block, int which) {
  if (test()) return true;
  if (emulated::leave([=] { return test() || *trouble; }, true)) return test();
  if (*trouble == 0) trouble[0] = what, trouble[1] = *phase, trouble[2] = block, trouble[3] = which;
  return false;
}
DEVICE void pause_us(int) {
  emulated::Block* block = emulated::current->block;
  emulated::leave([=] { return block->copies.empty(); });
}

DEVICE void barrier_init(u32 bar, u32 arrivals) {
  memset(shared_base() + bar, 0, 8);
  emulated::Barrier& b = emulated::barrier_at(bar);
  b = {};
  b.expected = b.pending = arrivals;
  b.is_made = true;
}
DEVICE void barrier_init_done() {}
DEVICE void barrier_arrive(u32 bar) {
  emulated::Barrier& b = emulated::barrier_at(bar);
  if (!b.is_made || b.pending == 0) fprintf(stderr, "a barrier was not ready for an arrival\n"), abort();
  b.pending--;
  b.settle();
}
DEVICE void barrier_arrive_expecting(u32 bar, u32 bytes) {
  emulated::barrier_at(bar).bytes += bytes;
  barrier_arrive(bar);
}
DEVICE bool barrier_passed(u32 bar, u32 parity) { return (emulated::barrier_at(bar).phase & 1) != parity; }
DEVICE void sync_warp() { emulated::exchange(0); }
template <int ID, int COUNT>
DEVICE void sync_some() {
  emulated::Named* named = &emulated::current->block->named[ID];
  const u64 generation = named->generation;
  if (++named->arrived == COUNT) {
    named->arrived = 0;
    named->generation++;
  } else {
    emulated::leave([=] { return named->generation != generation; });
  }
}
DEVICE void sync_block() { sync_some<0, THREADS>(); }

DEVICE u64 read_once_policy() { return 0; }
DEVICE void copy_shared(u32 to, const u8* from, u32 bytes, u32 bar) {
  if (to % 16 || (uintptr_t)from % 16 || bytes % 16) fprintf(stderr, "a copy is not aligned\n"), abort();
  emulated::current->block->copies.push_back({to, from, bytes, bar});
}
DEVICE void copy_once(u32 to, const u8* from, u32 bytes, u32 bar, u64) { copy_shared(to, from, bytes, bar); }
DEVICE void order_shared() {}
DEVICE void order_global() {}

DEVICE void add_release(u32* counter) { ++*counter; }
DEVICE u32 read_acquire(const u32* counter) { return *counter; }
DEVICE void raise_to(u64* at, u64 value) { *at = std::max(*at, value); }
DEVICE void raise_shared(u32* at, u32 value) { *at = std::max(*at, value); }
template <class T>
static T read_as(const void* p) {
  if ((uintptr_t)p % sizeof(T)) fprintf(stderr, "a load of %zu bytes is not aligned\n", sizeof(T)), abort();
  T v;
  memcpy(&v, p, sizeof v);
  return v;
}
DEVICE float far_float(const float* p) { return read_as<float>(p); }
DEVICE float4 far_float4(const void* p) { return read_as<float4>(p); }
DEVICE uint4 far_words(const void* p) { return read_as<uint4>(p); }
DEVICE void bring_near(const void*) {}
DEVICE u64 far_u64(const u64* p) { return read_as<u64>(p); }
DEVICE void put_far_float(float* p, float v) { *p = v; }
DEVICE void put_far_float2(float* p, float a, float b) { p[0] = a, p[1] = b; }

DEVICE u32 bits_of(float v) {
  u32 r;
  memcpy(&r, &v, 4);
  return r;
}
DEVICE float float_of(u32 v) {
  float r;
  memcpy(&r, &v, 4);
  return r;
}
DEVICE u32 shuffle(u32 v, int lanes) { return (u32)emulated::exchange(v)[(emulated::current->thread % 32) ^ lanes]; }
DEVICE float shuffle(float v, int lanes) { return float_of(shuffle(bits_of(v), lanes)); }
DEVICE u32 first_lane(u32 v) { return (u32)emulated::exchange(v)[0]; }

DEVICE float bf16_to_float(u16 v) { return float_of((u32)v << 16); }
DEVICE u16 float_to_bf16(float v) {
  if (v != v) return 0x7fff;
  const u32 bits = bits_of(v);
  return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
DEVICE u32 two_bf16(float low, float high) { return (u32)float_to_bf16(high) << 16 | float_to_bf16(low); }
DEVICE float fp8_to_float(u8 code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 0x7f) == 0x7f) return NAN;
  const float v = exponent ? std::ldexp(1.0f + mantissa / 8.0f, exponent - 7) : std::ldexp(mantissa / 8.0f, -6);
  return code & 0x80 ? -v : v;
}
DEVICE u8 float_to_fp8(float v) {
  if (v != v) return 0x7f;
  const u8 sign = std::signbit(v) ? 0x80 : 0;
  const float a = std::min(std::fabs(v), 448.0f);
  if (a == 0) return sign;
  int exponent;
  std::frexp(a, &exponent);
  exponent = std::max(exponent - 1, -6);
  const float steps = std::nearbyint(std::ldexp(a, 3 - exponent));  // of an eighth of the power of two
  int code = (int)steps + (exponent + 6) * 8;                       // a full octave carries over by itself
  return sign | (u8)std::min(code, 0x7e);
}
DEVICE u16 two_fp8(float low, float high) { return (u16)(float_to_fp8(high) << 8 | float_to_fp8(low)); }
DEVICE u32 two_fp8_to_bf16(u16 v) { return two_bf16(fp8_to_float((u8)v), fp8_to_float((u8)(v >> 8))); }
DEVICE float inverse(float v) { return 1.0f / v; }
DEVICE float inverse_root(float v) { return 1.0f / std::sqrt(v); }
DEVICE float power_of_two(float v) { return std::exp2(v); }

DEVICE void load_matrices(u32* r, u32 address) {
  const u64* rows = emulated::exchange(address);
  const int lane = emulated::current->thread % 32;
  for (int i = 0; i < 4; i++) r[i] = read_as<u32>(shared_base() + rows[8 * i + lane / 4] + lane % 4 * 4);
  if (address % 16) fprintf(stderr, "a matrix's row is not aligned\n"), abort();
  sync_warp();
}
DEVICE void load_transposed(u32* r, u32 address) {
  const u64* rows = emulated::exchange(address);
  const int lane = emulated::current->thread % 32, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; i++) {
    const u16 low = read_as<u16>(shared_base() + rows[8 * i + 2 * t] + 2 * g);
    const u16 high = read_as<u16>(shared_base() + rows[8 * i + 2 * t + 1] + 2 * g);
    r[i] = (u32)high << 16 | low;
  }
  sync_warp();
}
DEVICE void multiply_16x8(float* c, const u32* a, u32 b0, u32 b1) {
  const int lane = emulated::current->thread % 32, g = lane / 4, t = lane % 4;
  float all_a[16][16], all_b[16][8];
  for (int i = 0; i < 4; i++) {
    const u64* words = emulated::exchange(a[i]);
    for (int l = 0; l < 32; l++)
      for (int h = 0; h < 2; h++)
        all_a[l / 4 + i % 2 * 8][l % 4 * 2 + h + i / 2 * 8] = bf16_to_float((u16)(words[l] >> 16 * h));
  }
  for (int i = 0; i < 2; i++) {
    const u64* words = emulated::exchange(i ? b1 : b0);
    for (int l = 0; l < 32; l++)
      for (int h = 0; h < 2; h++) all_b[l % 4 * 2 + h + 8 * i][l / 4] = bf16_to_float((u16)(words[l] >> 16 * h));
  }
  for (int i = 0; i < 4; i++) {
    double sum = c[i];
    for (int k = 0; k < 16; k++) sum += (double)all_a[g + i / 2 * 8][k] * all_b[k][2 * t + i % 2];
    c[i] = (float)sum;
  }
}

DEVICE u64 descriptor(u32 address, u32 along_k, u32 along_rows) {
  return (u64)((address >> 4) & 0x3fff) | (u64)(along_k >> 4) << 16 | (u64)(along_rows >> 4) << 32;
}
DEVICE u64 descriptor_step(u32 bytes) { return bytes >> 4; }
DEVICE void products_begin() {}
DEVICE void products_commit() {}
template <int N>
DEVICE void products_wait(float*) {}
template <bool EIGHT_BITS>
static float element(u64 descriptor, int row, int k) {
  const u32 base = (u32)(descriptor & 0x3fff) << 4, along_k = (u32)(descriptor >> 16 & 0x3fff) << 4;
  const u32 along_rows = (u32)(descriptor >> 32 & 0x3fff) << 4, byte = EIGHT_BITS ? k : 2 * k;
  const u8* at = shared_base() + base + byte / 16 * along_k + row / 8 * along_rows + row % 8 * 16 + byte % 16;
  return EIGHT_BITS ? fp8_to_float(*at) : bf16_to_float(read_as<u16>(at));
}
template <int N, bool EIGHT_BITS, bool IS_FIRST>
DEVICE void multiply_64(float* d, u64 a, u64 b) {
  const int thread = emulated::current->thread, w = thread / 32 % 4, g = thread % 32 / 4, t = thread % 4;
  constexpr int K = EIGHT_BITS ? 32 : 16;
  for (int half = 0; half < 2; half++) {
    float row[K];
    for (int k = 0; k < K; k++) row[k] = element<EIGHT_BITS>(a, 16 * w + g + 8 * half, k);
    for (int j = 0; j < N / 8; j++)
      for (int i = 0; i < 2; i++) {
        double sum = !IS_FIRST ? d[4 * j + 2 * half + i] : 0;
        for (int k = 0; k < K; k++) sum += (double)row[k] * element<EIGHT_BITS>(b, 8 * j + 2 * t + i, k);
        d[4 * j + 2 * half + i] = (float)sum;
      }
  }
}

KERNEL step(PARAMETERS p);

namespace emulated {

static void start_fibre() {
  step(*parameters);
  current->is_done = true;
  current->block->running--;
  swapcontext(&current->context, &scheduler);
}

}  // namespace emulated

// Runs `launched` of the grid's blocks to their end. Returns how often threads took turns, or -1 if nobody can go on.
extern "C" long long run_step(const Params* params, int launched, u32 seed) {
  using namespace emulated;
  parameters = params;
  blocks.assign(launched, {});
  fibres.clear();
  fibres.resize((size_t)launched * THREADS);
  switches = 0;
  std::mt19937 random(seed);
  constexpr size_t STACK = 48 << 10;
  for (int b = 0; b < launched; b++) {
    blocks[b].memory.assign(SHARED_BYTES + 4096, 0x7f);
    blocks[b].warps.resize(THREADS / 32);
    blocks[b].running = THREADS;
    for (int t = 0; t < THREADS; t++) {
      Fibre& f = fibres[(size_t)b * THREADS + t];
      f.block = &blocks[b], f.thread = t;
      f.stack.reset(new char[STACK]);
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack.get();
      f.context.uc_stack.ss_size = STACK;
      f.context.uc_link = nullptr;
      makecontext(&f.context, (void (*)())start_fibre, 0);
    }
  }
  std::vector<int> order(fibres.size() / 32);
  for (size_t i = 0; i < order.size(); i++) order[i] = (int)i;
  size_t left = fibres.size();
  while (left) {
    bool has_moved = false;
    std::shuffle(order.begin(), order.end(), random);
    for (int warp : order)
      for (int lane = 0; lane < 32; lane++) {
        Fibre& f = fibres[(size_t)warp * 32 + lane];
        if (f.is_done) continue;
        current = &f;
        if (f.ready && !f.ready()) continue;
        f.ready = nullptr;
        swapcontext(&scheduler, &f.context);
        has_moved = true;
        if (f.is_done) left--;
      }
    for (size_t b = 0; b < blocks.size(); b++) {
      auto& copies = blocks[b].copies;
      if (copies.empty()) continue;
      const size_t pick = random() % copies.size();
      const Copy copy = copies[pick];
      copies.erase(copies.begin() + pick);
      current = &fibres[b * THREADS];
      finish_copy(blocks[b], copy, barrier_at(copy.bar));
      has_moved = true;
    }
    if (has_moved) continue;
    Fibre* late = nullptr;
    for (Fibre& f : fibres)
      if (!f.is_done && f.may_give_up) late = &f;
    if (!late) return -1;
    current = late;
    late->ready = nullptr;
    late->is_too_late = true;
    swapcontext(&scheduler, &late->context);
    if (late->is_done) left--;
  }
  for (auto& block : blocks)
    if (!block.copies.empty()) return -2;
  return (long long)switches;
}
