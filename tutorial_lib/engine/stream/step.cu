// A whole decode step in one launch: every layer, the head and the choice of a token; for a drafter all of its steps.
//
// Decoding at batch 1 is reading: each weight is used for a handful of rows and never again. So one block sits on each
// processor for the whole step, and its producer warp does nothing but bring that block's share of all weights, in the
// order in which they are needed, into a ring in shared memory. It stops for a full ring only, never for a phase: while
// the other warps wait for each other the memory goes on delivering.
//
//   warps 0-15   consumers   norms, products on tensor cores (4 warpgroups, every fourth tile each), attention
//   warp  16     producer    weights -> ring
//   warp  17     loader      activations of o, down (and what is `streamed`) -> beside their tile in the ring
//   warps 18-19  epilogues   partial sums -> queries, keys, values; residual; SiLU(gate) * up; the best token
//
// A token's way through a layer, `|` being a barrier of all blocks, since everyone needs what everyone made:
//
//   h -> norm, qkv | attention, page by page -> merge | o, h += | norm, gate_up, SiLU | down, h += |
//
// A block owns whole rows of every matrix (`plan.py`), so no sum crosses blocks, and every sum has one order, whether
// the launch has 1 row or 16: a row's result does not depend on the rows beside it, bit for bit. That is what makes
// speculative text equal to plain text. The norm is exact: each block computes it for itself from h and the sums of
// squares that the owners of h leave, which costs less than a barrier.
//
// A wait that lasts too long writes to `trouble` where it was. From then on nobody waits for anything: all blocks run
// to their end over whatever there is, within milliseconds, and later launches return at once.

// -------------------------------------------------------------------------------------------------- the model's shapes

enum Matrix { QKV, O, GATE_UP, DOWN, HEAD };
struct Shape {  // as `plan.Matrix`; streamed: its activations come with its tiles, not from shared memory
  int rows, k_bytes, group, groups, width, tiles, streamed;
  CONSTEXPR int pieces() const { return 64 / group; }
  CONSTEXPR int activation_bytes() const { return pieces() * width * ROWS; }  // that one tile meets
};
struct Shapes {
  Shape of[5];
};
#define SHAPE(M)                                                                    \
  {SHAPE_##M##_ROWS,  SHAPE_##M##_K_BYTES, SHAPE_##M##_GROUP,   SHAPE_##M##_GROUPS, \
   SHAPE_##M##_WIDTH, SHAPE_##M##_TILES,   SHAPE_##M##_STREAMED}
constexpr Shapes ALL = {{SHAPE(QKV), SHAPE(O), SHAPE(GATE_UP), SHAPE(DOWN), SHAPE(HEAD)}};
CONSTANT Shapes all_shapes = {{SHAPE(QKV), SHAPE(O), SHAPE(GATE_UP), SHAPE(DOWN), SHAPE(HEAD)}};

constexpr bool HAS_FP8 = IS_FP8, HAS_FP8_HEAD = IS_FP8_HEAD, HAS_FP8_CACHE = IS_FP8_CACHE;
constexpr int EACH = HAS_FP8 ? 1 : 2;      // bytes of an activation between the products of a layer
constexpr int QUERIES = HEADS / KV_HEADS;  // heads that share keys and values
constexpr int QKV_ROWS = (HEADS + 2 * KV_HEADS) * HEAD_DIM;
constexpr int HALF = HEAD_DIM / 2;            // the other element of a rotary pair is this far off
constexpr int COLUMN_TILES = (ROWS + 7) / 8;  // of 8 rows of the step
constexpr int CONSUMERS = 512;
constexpr float LOG2_E = 1.4426950408889634f;

CONSTEXPR int least(int a, int b) { return a < b ? a : b; }
CONSTEXPR int most(int a, int b) { return a > b ? a : b; }
CONSTEXPR int up_to(int a, int b) { return (a + b - 1) / b * b; }

// ------------------------------------------------------------------------------------------------------- shared memory

constexpr int SLAB_BYTES =
    16 * ROWS * 80;  // partial sums of 16 warps: [warp][row][16 of the matrix's rows, padded to 20]
constexpr int RESIDUAL_BLOCKS = (ALL.of[O].groups + BLOCKS - 1) / BLOCKS * (ALL.of[O].group / 16);

// Attention's work: a page of one sequence and one head of keys is a unit, and unit u is for block u % BLOCKS. The
// first few of a block are looked up once for all layers: what is read between barriers comes from far away.
struct Unit {
  int sequence, head, page, id;  // id: of the page in the cache; sequence -1: there is none
};
struct Shared {
  u64 full[STAGES], empty[STAGES], slab_full[2], slab_free[2];
  float inverse[16];  // of each row: 1 / root mean square
  float scale[16];    // of each row of an FP8 head's input
  u32 peak[16];
  int token[16], depth[16];  // of each row: what it is, and how far behind the step's first position
  int start[16], pages[16];  // of each sequence: its first row's position, and pages that hold anything
  u32 merged[16];            // of each sequence: pages that steps before this one added to attention's counters
  Unit unit[KNOWN_UNITS];    // this block's first ones
  u32 seen[16];              // the rows of its own sequence that it sees, a bit each
  float squares[RESIDUAL_BLOCKS][16];
  float residual[RESIDUAL_BLOCKS * COLUMN_TILES * 32][4];
  int is_lost, phase[THREADS / 32];
  u64 stamps[16];  // of the phase clock
};
constexpr int AREA = STAGES * SLOT_BYTES, SLAB = AREA + AREA_BYTES, REST = up_to(SLAB + SLABS * SLAB_BYTES, 128);
static_assert(REST + sizeof(Shared) <= SHARED_BYTES, "shared memory");

DEVICE Shared& shared() { return *(Shared*)(shared_base() + REST); }

// Where an activation lies: beside the tile that needs it, as tensor cores read it: [tile][16-byte column][piece, row].
CONSTEXPR int activation_at(const Shape& m, int k_byte, int row) {
  const int span = m.pieces() * m.width, tile = k_byte / span, inside = k_byte % span, byte = inside % m.width;
  const int line = inside / m.width * ROWS + row;
  return tile * m.activation_bytes() + (byte / 16 * m.pieces() * ROWS + line) * 16 + byte % 16;
}

// --------------------------------------------------------------------------------------------------- one thread's view

struct Self {
  const Params& p;
  int tid, warp;
  bool lost;
  u32 barrier;             // barriers of all blocks that lie behind
  u32 tile, slot, parity;  // of the ring
  u32 unit;                // slabs handed over

  METHOD int block() const { return block_index(); }
  METHOD int lane() const { return tid & 31; }
  METHOD int g() const { return tid >> 2 & 7; }  // lane = 4 g + t, as tensor cores deal out their results
  METHOD int t() const { return tid & 3; }
};

struct Turn {             // one step of a launch
  int step, rows, count;  // rows of each sequence, and of all
};

DEVICE Turn turn_of(const Params& p, int step) {
  const int rows = step ? 1 : p.rows;
  return {step, rows, rows * p.sequences};
}
DEVICE int start_of(const Params& p, const Turn& turn, int sequence) {  // the position of its first row
  return ((const int*)p.lengths)[sequence] + (turn.step ? p.rows - 1 + turn.step : 0);
}
DEVICE int pages_of(const Params& p, const Turn& turn, int sequence) {
  return least((start_of(p, turn, sequence) + turn.rows + PAGE - 1) / PAGE, MAX_PAGES);
}
DEVICE int share_of(const Shape& m, int block) {
  return block < m.groups ? (m.groups - block + BLOCKS - 1) / BLOCKS : 0;
}

enum Wait { FOR_BLOCKS = 1, FOR_A_TILE, FOR_ROOM_IN_THE_RING, FOR_SUMS, FOR_ROOM_FOR_SUMS, FOR_ATTENTION };

template <class Test>
DEVICE void wait(Self& me, Wait what, u32 which, Test test) {
  if (!me.lost) me.lost = !await(test, (int*)me.p.trouble, what, &shared().phase[me.warp], me.block(), which);
}
DEVICE void wait_for_blocks(Self& me) {
  const u32* counter = (const u32*)me.p.counters;
  const u32 all = BLOCKS * me.barrier;
  wait(me, FOR_BLOCKS, me.barrier, [=] { return read_acquire(counter) >= all; });
}
DEVICE void arrive_for_all(Self& me) { add_release((u32*)me.p.counters); }
DEVICE void sync_consumers() { sync_some<1, CONSUMERS>(); }
DEVICE void consumers_wait_for_blocks(Self& me) {
  if (me.tid == 0) wait_for_blocks(me);
  sync_consumers();
}

// A phase begins: registers are scarce, and what an earlier one computed of the thread's place is soon computed again.
DEVICE void begin_phase(Self& me, int phase) {
  if (me.lane() == 0) shared().phase[me.warp] = phase;  // for the error that names it
  forget(me.tid);
}

DEVICE void next_slot(Self& me) {
  me.tile++;
  if (++me.slot == STAGES) {
    me.slot = 0;
    me.parity ^= 1;
  }
}
DEVICE u32 slot_address(u32 slot) { return shared_address(shared_base()) + slot * SLOT_BYTES; }

template <class T>
DEVICE T* scratch(const Params& p, int at) {
  return (T*)(p.scratch + at);
}

// The phase clock, off unless there is a place for it: 16 cycle counts for each layer and the head, of the last step,
// per block, as its first consumer thread saw them.
enum Stamp {
  QKV_WAITS,
  QKV_NORM,
  QKV_STARTS,
  QKV_ENDS,
  O_WAITS,
  O_ATTENDS,
  O_MERGES,
  O_STARTS,
  O_ENDS,
  GATE_UP_WAITS,
  GATE_UP_NORM,
  GATE_UP_STARTS,
  GATE_UP_ENDS,
  DOWN_STARTS,
  DOWN_ENDS,
  STAMPS = 16,
  HEAD_WAITS = 0,
  HEAD_NORM,
  HEAD_STARTS,
  HEAD_ENDS,
  BEGIN_CYCLES = 12,
  BEGIN_NS,
  END_CYCLES,
  END_NS  // behind the last layer's
};
DEVICE void stamp(const Self& me, int which) {
  if (me.p.clock && me.tid == 0) shared().stamps[which] = cycles();
}
DEVICE void keep_stamps(const Self& me, int layer) {
  if (!me.p.clock || me.tid) return;
  u64* at = (u64*)me.p.clock + (me.block() * (me.p.layers + 1) + layer) * STAMPS;
#pragma unroll 1
  for (int i = 0; i < STAMPS; i++) at[i] = shared().stamps[i];
}

// ----------------------------------------------------------------------------------------------------- what was chosen

// One word that is larger for a larger logit, and among equal ones for the smaller row of the head. No number counts as
// infinite, which is found out at the end.
DEVICE u64 choice_of(float logit, int row) {
  const float v = logit != logit ? float_of(0x7f800000u) : logit + 0.0f;
  const u32 bits = bits_of(v), key = bits >> 31 ? ~bits : bits | 0x80000000u;
  return (u64)key << 32 | (0xffffffffu - (u32)row);
}
DEVICE u64* choices_at(const Params& p, int step) { return (u64*)((u32*)p.counters + CHOICES_AT) + step * 16; }
DEVICE int token_of_choice(const Params& p, u64 choice) {
  const u32 row = 0xffffffffu - (u32)choice;
  const int known = least((int)(row & 0x7fffffffu), ALL.of[HEAD].rows - 1);
  return p.ids ? (int)((const long long*)p.ids)[known] : known;
}
DEVICE bool is_no_number(u64 choice) {  // the best is infinite, or there was none
  const u32 key = (u32)(choice >> 32);
  return key >= 0xff800000u || key <= 0x007fffffu;
}
DEVICE int token_of(const Params& p, const Turn& turn, int row) {
  if (turn.step == 0) return ((const int*)p.tokens)[row];
  const int rows = turn.step == 1 ? p.rows : 1;  // of the step before, whose last row of each sequence counts
  return token_of_choice(p, far_u64(choices_at(p, turn.step - 1) + row * rows + rows - 1));
}

DEVICE Unit unit_of(const Params& p, int block, int turn) {
  const Shared& s = shared();
  int unit = block + turn * BLOCKS;
  for (int sequence = 0; sequence < p.sequences; sequence++) {
    const int pages = s.pages[sequence];
    if (unit < pages * KV_HEADS) {
      const long long row = (long long)((const int*)p.slots)[sequence] * p.table_stride;
      return {sequence, unit / pages, unit % pages, ((const int*)p.table)[row + unit % pages]};
    }
    unit -= pages * KV_HEADS;
  }
  return {-1, 0, 0, 0};
}
DEVICE void find_units(Self& me, int first) {
  sync_consumers();  // what is there has been read, and what it is found by written
  if (me.tid < KNOWN_UNITS) shared().unit[me.tid] = unit_of(me.p, me.block(), first + me.tid);
  sync_consumers();
}

// What the consumers have to know of the rows of a step.
DEVICE void begin_turn(Self& me, const Turn& turn) {
  Shared& s = shared();
  consumers_wait_for_blocks(me);  // for the tokens that the step before chose
  if (me.tid < turn.count) {
    const int row = me.tid, inside = row % turn.rows;
    u32 seen = (2u << inside) - 1;
    if (me.p.mask) {
      seen = 0;
      for (int i = 0; i < turn.rows; i++)
        if (((const signed char*)me.p.mask)[row * turn.rows + i]) seen |= 1u << i;
    }
    s.token[row] = token_of(me.p, turn, row);
    s.depth[row] = me.p.depths ? ((const int*)me.p.depths)[row] : inside;
    s.seen[row] = seen;
    s.peak[row] = 0;
  }
  if (me.tid < me.p.sequences) {
    s.merged[me.tid] = turn.step ? s.merged[me.tid] + me.p.layers * s.pages[me.tid] : 0;
    s.start[me.tid] = start_of(me.p, turn, me.tid);
    s.pages[me.tid] = pages_of(me.p, turn, me.tid);
  }
  find_units(me, 0);
}

// ----------------------------------------------------------------------------------------- 1. the norm, by every block

DEVICE const uint4* source_of(const Params& p, bool is_first, int row) {
  if (is_first) return (const uint4*)((const u16*)p.embedding + (long long)shared().token[row] * HIDDEN);
  return (const uint4*)(scratch<const u16>(p, AT_H) + row * HIDDEN);
}

// 1 / root mean square of every row, from what the owners of h left, or from the embeddings themselves.
DEVICE void find_inverses(Self& me, const Turn& turn, bool is_first) {
  Shared& s = shared();
  constexpr int OWNERS = least(BLOCKS, ALL.of[O].groups);
  const bool is_few =
      turn.count <= 2;  // then every warp finds them for itself, which is sooner than to wait for another
#pragma unroll 1
  for (int row = is_few ? 0 : me.warp; row < turn.count; row += is_few ? 1 : 16) {
    float sum = 0;
    if (is_first) {
      const uint4* h = source_of(me.p, true, row);
#pragma unroll 1
      for (int i = me.lane(); i < HIDDEN / 8; i += 32) {
        const uint4 w = far_words(h + i);
        const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float low = float_of(words[j] << 16), high = float_of(words[j] & 0xffff0000u);
          sum += low * low + high * high;
        }
      }
    } else {
      const float* sums = scratch<const float>(me.p, AT_SQUARES) + row * BLOCKS;
      float part[(OWNERS + 31) / 32];
#pragma unroll
      for (int i = 0; i < (OWNERS + 31) / 32; i++) {
        const int owner = me.lane() + 32 * i;
        part[i] = owner < OWNERS ? far_float(sums + owner) : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < (OWNERS + 31) / 32; i++) sum += part[i];
    }
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) sum += shuffle(sum, lanes);
    if (me.lane() == 0) s.inverse[row] = inverse_root(sum * (1.0f / HIDDEN) + me.p.eps);
  }
  if (is_few)
    sync_warp();
  else
    sync_consumers();
}

// 8 bf16 x inverse x weight.
DEVICE void normed(float* out, const uint4& h, const uint4& weight, float inverse) {
  const u32 a[4] = {h.x, h.y, h.z, h.w}, w[4] = {weight.x, weight.y, weight.z, weight.w};
#pragma unroll
  for (int j = 0; j < 4; j++) {
    out[2 * j] = float_of(a[j] << 16) * inverse * float_of(w[j] << 16);
    out[2 * j + 1] = float_of(a[j] & 0xffff0000u) * inverse * float_of(w[j] & 0xffff0000u);
  }
}
DEVICE u32 four_fp8(const float* v, float factor) {
  return (u32)two_fp8(v[0] * factor, v[1] * factor) | (u32)two_fp8(v[2] * factor, v[3] * factor) << 16;
}
template <bool TO_FP8>
DEVICE uint4 packed(const float* v, float factor) {
  if constexpr (TO_FP8)
    return {four_fp8(v, factor), four_fp8(v + 4, factor), four_fp8(v + 8, factor), four_fp8(v + 12, factor)};
  else
    return {two_bf16(v[0], v[1]), two_bf16(v[2], v[3]), two_bf16(v[4], v[5]), two_bf16(v[6], v[7])};
}

// The input of a product, in units of 16 bytes (16 FP8 or 8 bf16 values) of a row: into shared memory, or, where that
// has no room for it, each block a part into global memory, from where the loader brings it along with the tiles; then
// one more barrier lies behind. An FP8 head takes a scale of each row's largest value: first pass.
template <bool TO_FP8>
DEVICE void normalize(Self& me, const Turn& turn, int layer, int matrix, const Shape& m, bool is_first) {
  constexpr int WORDS = TO_FP8 ? 2 : 1;    // uint4 of 8 bf16 values that make a unit
  constexpr int BATCH = ROWS > 4 ? 3 : 1;  // rows whose loads are under way at once
  constexpr bool IS_AHEAD = ROWS <= 4;     // the first of them before the rows' means are known
  constexpr bool FINDS_SCALE = TO_FP8 && HAS_FP8_HEAD;
  Shared& s = shared();
  const bool is_head = matrix == HEAD;
  const u16* weight =
      (const u16*)me.p.norms + (long long)(2 * layer + (matrix == GATE_UP)) * HIDDEN;  // the last: the head's
  const float factor = HAS_FP8 && !is_head ? inverse(((const float*)me.p.input_scales)[layer * 4 + matrix]) : 1.0f;
  const int units = m.tiles * m.pieces() * m.width / 16, real = m.k_bytes / 16;  // beyond are zeros, as in the weights
  const int threads = m.streamed ? BLOCKS * CONSUMERS : CONSUMERS,
            own = m.streamed ? me.block() + BLOCKS * me.tid : me.tid;
  const int abreast = most(1, threads / units);  // rows that the threads take at once
  const int first = own / units, start_unit = abreast > 1 ? own % units : own;
  u8* const to = m.streamed ? scratch<u8>(me.p, AT_NORMED) : shared_base() + AREA;
  uint4 w[WORDS], h[BATCH][WORDS];
  const auto load_weight = [&](int unit) {
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
      w[i] = {0, 0, 0, 0};
      if (unit < real) w[i] = *((const uint4*)weight + unit * WORDS + i);
    }
  };
  const auto load = [&](int unit, int row) {
#pragma unroll
    for (int b = 0; b < BATCH; b++)
#pragma unroll
      for (int i = 0; i < WORDS; i++) {
        h[b][i] = {0, 0, 0, 0};
        if (row + b * abreast < turn.count && unit < real)
          h[b][i] = far_words(source_of(me.p, is_first, row + b * abreast) + unit * WORDS + i);
      }
  };
  const bool is_busy = first < abreast && start_unit < units;
  load_weight(is_busy ? start_unit : real);  // while the others are still at work
  consumers_wait_for_blocks(me);
  stamp(me, is_head ? HEAD_NORM : matrix == QKV ? QKV_NORM : GATE_UP_NORM);
  if (IS_AHEAD && is_busy) load(start_unit, first);
  find_inverses(me, turn, is_first);
#pragma unroll 1
  for (int pass = FINDS_SCALE && is_head ? 0 : 1; pass < 2; pass++) {
#pragma unroll 1
    for (int unit = start_unit; is_busy && unit < units; unit += threads) {
      if (unit != start_unit || (FINDS_SCALE && is_head && pass)) load_weight(unit);
      u8* const at = to + activation_at(m, unit * 16, 0);
#pragma unroll 1
      for (int row = first; row < turn.count; row += abreast * BATCH) {
        if (!IS_AHEAD || unit != start_unit || row != first || (FINDS_SCALE && is_head && pass)) load(unit, row);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
          const int here = row + b * abreast;
          if (here >= turn.count) continue;
          float v[8 * WORDS];
#pragma unroll
          for (int i = 0; i < WORDS; i++) normed(v + 8 * i, h[b][i], w[i], s.inverse[here]);
          if (FINDS_SCALE && pass == 0) {
            float peak = 0;
#pragma unroll
            for (int i = 0; i < 8 * WORDS; i++) peak = fmaxf(peak, fabsf(v[i]));
            raise_shared(&s.peak[here], bits_of(peak));
          } else {
            *(uint4*)(at + here * 16) = packed<TO_FP8>(v, FINDS_SCALE && is_head ? inverse(s.scale[here]) : factor);
          }
        }
      }
    }
    if (FINDS_SCALE && pass == 0) {
      sync_consumers();
      if (me.tid < turn.count) s.scale[me.tid] = fmaxf(float_of(s.peak[me.tid]), 1e-6f) * (1.0f / 448);
      sync_consumers();
    }
  }
  if (m.streamed)
    order_global();
  else
    order_shared();
  sync_consumers();
}
static_assert(!(HAS_FP8_HEAD && ALL.of[HEAD].streamed), "a row's scale needs the whole row");

DEVICE void prepare_input(Self& me, const Turn& turn, int layer, int matrix) {
  const Shape& m = all_shapes.of[matrix];
  const bool is_first = matrix == QKV && layer == 0;
  stamp(me, matrix == HEAD ? HEAD_WAITS : matrix == QKV ? QKV_WAITS : GATE_UP_WAITS);
  if (!m.streamed && share_of(m, me.block()) == 0)
    consumers_wait_for_blocks(me);
  else if (HAS_FP8 == HAS_FP8_HEAD || matrix != HEAD)
    normalize<HAS_FP8>(me, turn, layer, matrix, m, is_first);
  else
    normalize<HAS_FP8_HEAD>(me, turn, layer, matrix, m, is_first);
  if (m.streamed) {
    if (me.tid == 0) arrive_for_all(me);
    me.barrier++;
  }
}

// -------------------------------------------------------------------------------------- 2. products, as the tiles come

// A tile that another warpgroup takes. Every warp sees every tile, so none can mistake an old turn of the ring for a
// new.
DEVICE void pass_tile(Self& me) {
  const u32 bar = shared_address(&shared().full[me.slot]), parity = me.parity;
  wait(me, FOR_A_TILE, me.tile, [=] { return barrier_passed(bar, parity); });
  sync_warp();
  if (me.lane() == 0) barrier_arrive(shared_address(&shared().empty[me.slot]));
  next_slot(me);
}

// This block's rows of one matrix, group by group: 64 rows of it, or 16 whose K lies in the tile in four pieces one
// below the other ("diagonal": every piece meets all four pieces of the activations, and only its own counts). A tensor
// core adds up 4 instructions' worth of K at most, the rest is added in float32.
template <int GROUP, int WIDTH, bool IS_FP8_PRODUCT>
DEVICE void multiply(Self& me, const Shape& m) {
  constexpr int PIECES = 64 / GROUP, N = GROUP == 64 ? COLUMN_TILES * 8 : PIECES * ROWS;
  constexpr int KEPT = GROUP == 64 ? COLUMN_TILES : ROWS > 8 ? 2 : 1;  // column tiles of N that are this warp's
  constexpr u32 COLUMN_BYTES = PIECES * ROWS * 16;
  const int warpgroup = me.warp >> 2, quarter = me.warp & 3, groups = share_of(m, me.block());
  constexpr int STEPS = WIDTH / 32, CHAIN = 4;
  const u32 area = shared_address(shared_base() + AREA), in_slot = TILE_BYTES;
#pragma unroll 1
  for (int group = 0; group < groups; group++) {
    float sum[KEPT * 4] = {};
    const int own = (warpgroup - (int)me.tile) & 3;  // our first tile in this group
    int tile = 0, foreign = own;
#pragma unroll 1
    while (true) {
#pragma unroll 1
      for (; foreign && tile < m.tiles; --foreign, ++tile) pass_tile(me);
      if (tile >= m.tiles) break;
      const u32 bar = shared_address(&shared().full[me.slot]), parity = me.parity;
      wait(me, FOR_A_TILE, me.tile, [=] { return barrier_passed(bar, parity); });
      sync_warp();
      const u32 weights = slot_address(me.slot);
      const u32 activations = m.streamed ? weights + in_slot : area + tile * m.activation_bytes();
      const u64 a = descriptor(weights, 1024, 128), b = descriptor(activations, COLUMN_BYTES, 128);
#pragma unroll
      for (int done = 0; done < STEPS; done += CHAIN) {
        float d[N / 2];
        products_begin();
#pragma unroll
        for (int k = done; k < least(done + CHAIN, STEPS); k++) {
          const u64 from = a + k * descriptor_step(2048), with = b + k * descriptor_step(2 * COLUMN_BYTES);
          if (k == done)
            multiply_64<N, IS_FP8_PRODUCT, true>(d, from, with);
          else
            multiply_64<N, IS_FP8_PRODUCT, false>(d, from, with);
        }
        products_commit();
        products_wait<N>(d);
        if constexpr (GROUP == 64) {
#pragma unroll
          for (int i = 0; i < KEPT * 4; i++) sum[i] += d[i];
        } else {
#pragma unroll
          for (int i = 0; i < KEPT * 4; i++) {
            float v = d[i];
#pragma unroll
            for (int q = 1; q < 4; q++) v = quarter == q ? d[q * ROWS / 8 * 4 + i] : v;
            sum[i] += v;
          }
        }
      }
      if (me.lane() == 0) barrier_arrive(shared_address(&shared().empty[me.slot]));
      next_slot(me);
      ++tile;
      foreign = 3;
    }
    // hand the sums to the epilogue warps: [quarter, turn of the warpgroup][row of the step][row of the matrix]
    const u32 slab = me.unit % SLABS, before = me.unit / SLABS;
    me.unit++;
    if (before) {
      const u32 bar = shared_address(&shared().slab_free[slab]);
      wait(me, FOR_ROOM_FOR_SUMS, me.unit, [=] { return barrier_passed(bar, (before - 1) & 1); });
    }
    if (own < m.tiles) {
      float* out = (float*)(shared_base() + SLAB + slab * SLAB_BYTES) + (quarter * 4 + own) * (ROWS * 20);
#pragma unroll
      for (int j = 0; j < KEPT; j++) {
        const int row =
            GROUP == 64 ? j * 8 + 2 * me.t() : (quarter * ROWS / 8 + j) * 8 + 2 * me.t() - quarter * ROWS;
#pragma unroll
        for (int i = 0; i < 2; i++) {
          if (row + i < 0 || row + i >= ROWS) continue;
          out[(row + i) * 20 + me.g()] = sum[4 * j + i];
          out[(row + i) * 20 + me.g() + 8] = sum[4 * j + 2 + i];
        }
      }
    }
    sync_warp();
    if (me.lane() == 0) barrier_arrive(shared_address(&shared().slab_full[slab]));
  }
}

// Matrices whose tiles have one form share the code: it is the instruction cache that a loop over layers must fit.
CONSTEXPR bool is_fp8(int matrix) { return matrix == HEAD ? HAS_FP8_HEAD : HAS_FP8; }
CONSTEXPR bool is_alike(int a, int b) {
  return ALL.of[a].group == ALL.of[b].group && ALL.of[a].width == ALL.of[b].width && is_fp8(a) == is_fp8(b);
}
CONSTEXPR int first_alike(int matrix) {
  int first = QKV;
  while (!is_alike(first, matrix)) first++;
  return first;
}
template <int M>
DEVICE void multiply_alike(Self& me, int matrix) {
  if constexpr (first_alike(M) == M) {
    constexpr int USERS = (first_alike(QKV) == M) << QKV | (first_alike(O) == M) << O |
                          (first_alike(GATE_UP) == M) << GATE_UP | (first_alike(DOWN) == M) << DOWN |
                          (first_alike(HEAD) == M) << HEAD;
    if (USERS >> matrix & 1) multiply<ALL.of[M].group, ALL.of[M].width, is_fp8(M)>(me, all_shapes.of[matrix]);
  }
}
DEVICE void multiply_any(Self& me, int matrix) {
  multiply_alike<QKV>(me, matrix);
  multiply_alike<O>(me, matrix);
  multiply_alike<GATE_UP>(me, matrix);
  multiply_alike<DOWN>(me, matrix);
  multiply_alike<HEAD>(me, matrix);
  me.barrier++;  // which the epilogue warps arrive at
}

// ------------------------------------------------------------------------------------------ 3. attention, page by page

constexpr int QUERY_ROWS = up_to(ROWS * QUERIES, 16);  // rows of the step times heads, of one head of keys
constexpr int LINE = HEAD_DIM * 2 + 16;                // bytes from one row to the next in shared memory: no conflicts
static_assert((QUERY_ROWS + 2 * PAGE) * LINE <= AREA_BYTES, "queries, and a page of keys and of values");
constexpr float NEVER = -1e30f;

DEVICE void put_4(u8* at, const float* v) { *(uint2*)at = {two_bf16(v[0], v[1]), two_bf16(v[2], v[3])}; }

// 4 values into the cache and, as they are then read from it, into shared memory.
DEVICE void put_into_cache(u8* cache, u8* copy, const float* v, float scale) {
  if constexpr (HAS_FP8_CACHE) {
    const u32 codes = four_fp8(v, inverse(scale));
    *(u32*)cache = codes;
    *(uint2*)copy = {two_fp8_to_bf16((u16)codes), two_fp8_to_bf16((u16)(codes >> 16))};
  } else {
    put_4(cache, v);
    put_4(copy, v);
  }
}

struct Page {                                  // of one sequence and one head of keys
  int sequence, head, page, start, positions;  // start: of the step's first row; positions: that hold anything
  u8* cache;                                   // its keys; its values are KV_HEADS pages further
};
constexpr int CACHE_EACH = HAS_FP8_CACHE ? 1 : 2, HEAD_PAGE_BYTES = PAGE * HEAD_DIM * CACHE_EACH;
constexpr int PIECES_OF_PAGE = HEAD_PAGE_BYTES / 16, PIECES_EACH = (PIECES_OF_PAGE + CONSUMERS - 1) / CONSUMERS;

// What the cache has of the keys or values of a page, first into registers, then into shared memory; zeros behind.
DEVICE void read_page(Self& me, const Page& page, const u8* from, uint4* held) {
#pragma unroll
  for (int j = 0; j < PIECES_EACH; j++) {
    const int piece = me.tid + j * CONSUMERS, key = piece * 16 / (HEAD_DIM * CACHE_EACH);
    held[j] = {0, 0, 0, 0};
    if (piece < PIECES_OF_PAGE && page.page * PAGE + key < page.start) held[j] = far_words(from + piece * 16);
  }
}
DEVICE void keep_page(Self& me, const Page& page, const uint4* held, u8* to) {
#pragma unroll
  for (int j = 0; j < PIECES_EACH; j++) {
    const int piece = me.tid + j * CONSUMERS, key = piece * 16 / (HEAD_DIM * CACHE_EACH);
    const int position = page.page * PAGE + key;
    if (piece >= PIECES_OF_PAGE || (position >= page.start && position < page.positions)) continue;
    u8* at = to + key * LINE + piece * 16 % (HEAD_DIM * CACHE_EACH) * (2 / CACHE_EACH);
    if constexpr (HAS_FP8_CACHE) {
      const u32 codes[4] = {held[j].x, held[j].y, held[j].z, held[j].w};
#pragma unroll
      for (int i = 0; i < 4; i++)
        *(uint2*)(at + 8 * i) = {two_fp8_to_bf16((u16)codes[i]), two_fp8_to_bf16((u16)(codes[i] >> 16))};
    } else {
      *(uint4*)at = held[j];
    }
  }
}

// What the product left of the step's own rows: the queries of all rows and heads that share this head of keys, into
// shared memory; and the keys and values that belong into this page, into the cache too. An item is 8 values: 4 rotary
// pairs, normed (Qwen3) and rotated, or 8 values as they are. The lanes of one head lie side by side.
struct Item {
  bool is_active, is_query, is_value;
  int line, position, row, low, high;  // low, high: where in the head its two fours stand
  float a[4], b[4], c[4], s[4];
};
DEVICE void read_item(Self& me, const Turn& turn, const Page& page, int padded, int first, int fresh, int number,
                      Item& it) {
  constexpr int EIGHTHS = HEAD_DIM / 8;
  const int lines = turn.rows * QUERIES;
  it.is_active = number < (padded + 2 * fresh) * EIGHTHS;
  if (!it.is_active) number = 0;
  const int i = number % EIGHTHS;
  it.line = number / EIGHTHS;
  it.is_query = it.line < padded, it.is_value = it.line >= padded + fresh;
  it.position = first + (it.line - padded) - (it.is_value ? fresh : 0);
  const int inside = it.is_query ? least(it.line, lines - 1) / QUERIES : it.position - page.start;
  it.row = page.sequence * turn.rows + inside;
  const int head =
      it.is_query ? page.head * QUERIES + it.line % QUERIES : HEADS + page.head + (it.is_value ? KV_HEADS : 0);
  it.low = it.is_value ? 8 * i : 4 * i, it.high = it.is_value ? it.low + 4 : HALF + it.low;
  const float* raw = scratch<const float>(me.p, AT_QKV) + it.row * QKV_ROWS + head * HEAD_DIM;
  const float4 a = far_float4(raw + it.low), b = far_float4(raw + it.high);
  it.a[0] = a.x, it.a[1] = a.y, it.a[2] = a.z, it.a[3] = a.w;
  it.b[0] = b.x, it.b[1] = b.y, it.b[2] = b.z, it.b[3] = b.w;
  const long long angle = (long long)(page.start + shared().depth[it.row]) * HALF + (it.is_value ? 0 : it.low);
  const float4 c = far_float4((const float*)me.p.cos + angle), s = far_float4((const float*)me.p.sin + angle);
  it.c[0] = c.x, it.c[1] = c.y, it.c[2] = c.z, it.c[3] = c.w;
  it.s[0] = s.x, it.s[1] = s.y, it.s[2] = s.z, it.s[3] = s.w;
}
DEVICE void keep_item(Self& me, const Turn& turn, int layer, const Page& page, u8* queries, u8* keys, u8* values,
                      Item& it) {
  if constexpr (HAS_QK_NORM) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) sum += it.a[j] * it.a[j] + it.b[j] * it.b[j];
#pragma unroll
    for (int lanes = HEAD_DIM / 16; lanes; lanes >>= 1) sum += shuffle(sum, lanes);
    const float inverse = inverse_root(sum * (1.0f / HEAD_DIM) + me.p.eps);
    const u16* norm = (const u16*)(it.is_query ? me.p.q_norm : me.p.k_norm) + layer * HEAD_DIM;
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (!it.is_value) {
        it.a[j] *= inverse * bf16_to_float(norm[it.low + j]);
        it.b[j] *= inverse * bf16_to_float(norm[it.high + j]);
      }
  }
  if (!it.is_value) {
    const int lines = turn.rows * QUERIES;
    const float factor = !it.is_query ? 1.0f : it.line < lines ? QUERY_FACTOR : 0.0f;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float x = it.a[j], y = it.b[j];
      it.a[j] = (x * it.c[j] - y * it.s[j]) * factor;
      it.b[j] = (y * it.c[j] + x * it.s[j]) * factor;
    }
  }
  if (!it.is_active) return;
  if (it.is_query) {
    put_4(queries + it.line * LINE + 2 * it.low, it.a);
    put_4(queries + it.line * LINE + 2 * it.high, it.b);
  } else {
    const int key = it.position % PAGE;
    const float scale = HAS_FP8_CACHE ? ((const float*)me.p.kv_scale)[layer * 2 + it.is_value] : 1.0f;
    u8* cache = page.cache + (it.is_value ? KV_HEADS * HEAD_PAGE_BYTES : 0) + key * HEAD_DIM * CACHE_EACH;
    u8* copy = (it.is_value ? values : keys) + key * LINE;
    put_into_cache(cache + it.low * CACHE_EACH, copy + 2 * it.low, it.a, scale);
    put_into_cache(cache + it.high * CACHE_EACH, copy + 2 * it.high, it.b, scale);
  }
}
// A page's keys and values, those of before from the cache and the step's own, and the queries, into shared memory.
DEVICE void gather(Self& me, const Turn& turn, int layer, const Page& page, u8* queries, u8* keys, u8* values) {
  constexpr int BATCH = ROWS > 4 && !HAS_QK_NORM ? 2 : 1;  // items whose loads are under way at once
  const int padded = up_to(turn.rows * QUERIES, 16), first = most(page.start, page.page * PAGE);
  const int fresh = most(0, least(page.positions, (page.page + 1) * PAGE) - first),
            all = (padded + 2 * fresh) * (HEAD_DIM / 8);
  uint4 k[PIECES_EACH], v[PIECES_EACH];
  Item items[BATCH];
  read_page(me, page, page.cache, k);
  read_page(me, page, page.cache + KV_HEADS * HEAD_PAGE_BYTES, v);
#pragma unroll 1
  for (int begin = 0; begin < all; begin += BATCH * CONSUMERS) {
#pragma unroll
    for (int b = 0; b < BATCH; b++)
      read_item(me, turn, page, padded, first, fresh, begin + b * CONSUMERS + me.tid, items[b]);
    if (begin == 0) {
      keep_page(me, page, k, keys);
      keep_page(me, page, v, values);
    }
#pragma unroll
    for (int b = 0; b < BATCH; b++) keep_item(me, turn, layer, page, queries, keys, values, items[b]);
  }
}

// A warp's task: 16 lines of queries against all keys of the page, then a part of the head's width of the values.
constexpr int WIDE = HEAD_DIM % 32 == 0 ? 32 : 16, PARTS = HEAD_DIM / WIDE, KEY_TILES = PAGE / 8;

DEVICE void scores_of(Self& me, const Turn& turn, int layer, const Page& page, const u8* queries, const u8* keys,
                      int tile, u32 weights[KEY_TILES][2], float peak[2], float total[2]) {
  float c[KEY_TILES][4] = {};
  const u32 q = shared_address(queries) + (tile * 16 + me.lane() % 16) * LINE + me.lane() / 16 * 16;
  const u32 k = shared_address(keys) + (me.lane() / 16 * 8 + me.lane() % 8) * LINE + me.lane() / 8 % 2 * 16;
#pragma unroll 1
  for (int at = 0; at < HEAD_DIM * 2; at += 32) {
    u32 a[4];
    load_matrices(a, q + at);
#pragma unroll
    for (int pair = 0; pair < KEY_TILES / 2; pair++) {
      u32 b[4];
      load_matrices(b, k + pair * 16 * LINE + at);
      multiply_16x8(c[2 * pair], a, b[0], b[1]);
      multiply_16x8(c[2 * pair + 1], a, b[2], b[3]);
    }
  }
  const float factor = LOG2_E * (HAS_FP8_CACHE ? ((const float*)me.p.kv_scale)[layer * 2] : 1.0f);
  const int lines = turn.rows * QUERIES;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int inside = least(tile * 16 + half * 8 + me.g(), lines - 1) / QUERIES;
    const int row = page.sequence * turn.rows + inside, offset = page.page * PAGE + 2 * me.t() - page.start;
    const int first = me.p.window ? shared().depth[row] - me.p.window + 1 : -1 << 30;  // that its window holds
    const u64 seen = shared().seen[row];
    float best = NEVER;
#pragma unroll
    for (int j = 0; j < KEY_TILES; j++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int at = offset + j * 8 + i;  // from the step's first position
        const bool is_seen = at >= first && (at < 0 || seen >> at & 1);
        float& score = c[j][half * 2 + i];
        score = is_seen ? score * factor : NEVER;
        best = fmaxf(best, score);
      }
    best = fmaxf(best, shuffle(best, 1));
    best = fmaxf(best, shuffle(best, 2));
    float sum = 0;
#pragma unroll
    for (int j = 0; j < KEY_TILES; j++) {
      float e[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float score = c[j][half * 2 + i];
        e[i] = score > NEVER ? power_of_two(score - best) : 0.0f;
      }
      const u32 both = two_bf16(e[0], e[1]);
      sum += float_of(both << 16) + float_of(both & 0xffff0000u);  // as they are multiplied
      weights[j][half] = both;
    }
    sum += shuffle(sum, 1);
    sum += shuffle(sum, 2);
    peak[half] = best;
    total[half] = sum;
  }
}

DEVICE void values_of(Self& me, const Turn& turn, int layer, const Page& page, const u8* values, int tile, int part,
                      const u32 weights[KEY_TILES][2], const float peak[2], const float total[2]) {
  float c[WIDE / 8][4] = {};
  const u32 v = shared_address(values) + (me.lane() % 16) * LINE + part * WIDE * 2 + me.lane() / 16 * 16;
#pragma unroll
  for (int j = 0; j < KEY_TILES; j += 2) {
    const u32 a[4] = {weights[j][0], weights[j][1], weights[j + 1][0], weights[j + 1][1]};
#pragma unroll
    for (int pair = 0; pair < WIDE / 16; pair++) {
      u32 b[4];
      load_transposed(b, v + j * 8 * LINE + pair * 32);
      multiply_16x8(c[2 * pair], a, b[0], b[1]);
      multiply_16x8(c[2 * pair + 1], a, b[2], b[3]);
    }
  }
  const float factor = HAS_FP8_CACHE ? ((const float*)me.p.kv_scale)[layer * 2 + 1] : 1.0f;
  const int lines = turn.rows * QUERIES;
  const int base = ((page.sequence * KV_HEADS + page.head) * MAX_PAGES + page.page) * lines;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int line = tile * 16 + half * 8 + me.g();
    if (line >= lines) continue;
    if (part == 0 && me.t() == 0) {
      put_far_float(scratch<float>(me.p, AT_PEAKS) + base + line, peak[half]);
      put_far_float(scratch<float>(me.p, AT_TOTALS) + base + line, total[half]);
    }
    float* out = scratch<float>(me.p, AT_VALUES) + (long long)(base + line) * HEAD_DIM + part * WIDE;
#pragma unroll
    for (int j = 0; j < WIDE / 8; j++)
      put_far_float2(out + j * 8 + 2 * me.t(), c[j][2 * half] * factor, c[j][2 * half + 1] * factor);
  }
}

DEVICE u32* attention_counter(const Params& p, int pair) { return (u32*)p.counters + PAIRS_AT + pair * 8; }

// Whatever page a key lies in decides alone with which others it is added up: not how many rows or blocks there are.
DEVICE void attend(Self& me, const Turn& turn, int layer) {
  const Shared& s = shared();
  u8 *queries = shared_base() + AREA, *keys = queries + QUERY_ROWS * LINE, *values = keys + PAGE * LINE;
  const int tiles = (turn.rows * QUERIES + 15) / 16;
  bool is_beyond = false;
#pragma unroll 1
  for (int i = 0;; i++) {
    if (i && i % KNOWN_UNITS == 0) {
      find_units(me, i);
      is_beyond = true;
    }
    const Unit unit = s.unit[i % KNOWN_UNITS];
    const bool is_there = unit.sequence >= 0;
    Page page;
    if (is_there) {
      page.sequence = unit.sequence, page.head = unit.head, page.page = unit.page;
      page.start = s.start[unit.sequence], page.positions = page.start + turn.rows;
      const long long at = ((long long)layer * me.p.pages + unit.id) * 2 * KV_HEADS + unit.head;
      page.cache = (u8*)me.p.cache + at * HEAD_PAGE_BYTES;
    }
    if (i == 0) {  // what earlier steps left of keys and values is there already, the step's own are not
      const int line = me.tid * 128;
      if (is_there && line < 2 * HEAD_PAGE_BYTES)
        bring_near(page.cache + (line < HEAD_PAGE_BYTES ? line : line + (KV_HEADS - 1) * HEAD_PAGE_BYTES));
      consumers_wait_for_blocks(me);
      stamp(me, O_ATTENDS);
    }
    if (!is_there) break;
    gather(me, turn, layer, page, queries, keys, values);
    sync_consumers();
#pragma unroll 1
    for (int task = me.warp; task < tiles * PARTS; task += 16) {
      u32 weights[KEY_TILES][2];
      float peak[2], total[2];
      scores_of(me, turn, layer, page, queries, keys, task / PARTS, weights, peak, total);
      values_of(me, turn, layer, page, values, task / PARTS, task % PARTS, weights, peak, total);
    }
    sync_consumers();
    if (me.tid == 0) add_release(attention_counter(me.p, unit.sequence * KV_HEADS + unit.head));
  }
  if (is_beyond) find_units(me, 0);  // for the next layer
}

// The pages of a head, merged: 8 lanes take every eighth page each and then add up in a fixed tree. A page that a row
// does not see at all adds exact zeros. Each block merges a part of one head (or of several), which is o's input.
DEVICE void merge(Self& me, const Turn& turn, int layer) {
  constexpr Shape m = ALL.of[O];
  const int pairs = me.p.sequences * KV_HEADS, each = most(1, BLOCKS / pairs), abreast = BLOCKS / each;
  const int lines = turn.rows * QUERIES, items = lines * (HEAD_DIM / 4);
  const float factor = HAS_FP8 ? inverse(((const float*)me.p.input_scales)[layer * 4 + O]) : 1.0f;
#pragma unroll 1
  for (int pair = me.block() / each; pair < pairs && me.block() < each * abreast; pair += abreast) {
    const int sequence = pair / KV_HEADS, head = pair % KV_HEADS, pages = shared().pages[sequence];
    if (me.tid == 0) {
      const u32 all = shared().merged[sequence] + (layer + 1) * pages;  // added to its counter since the launch began
      const u32* counter = attention_counter(me.p, pair);
      wait(me, FOR_ATTENTION, pair, [=] { return read_acquire(counter) >= all; });
    }
    sync_consumers();
#pragma unroll 1
    for (int begin = me.block() % each * (CONSUMERS / 8); begin < items; begin += each * (CONSUMERS / 8)) {
      const int item = least(begin + me.tid / 8, items - 1), line = item / (HEAD_DIM / 4),
                dim = item % (HEAD_DIM / 4) * 4;
      float peak = NEVER, total = 0, out[4] = {};
#pragma unroll 1
      for (int page = me.tid % 8; page < pages; page += 16) {
        float its_peak[2], its_total[2];
        float4 v[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {  // both on their way at once
          its_peak[j] = NEVER, its_total[j] = 0, v[j] = {0, 0, 0, 0};
          if (page + 8 * j >= pages) continue;
          const int at = (pair * MAX_PAGES + page + 8 * j) * lines + line;
          its_peak[j] = far_float(scratch<const float>(me.p, AT_PEAKS) + at);
          its_total[j] = far_float(scratch<const float>(me.p, AT_TOTALS) + at);
          v[j] = far_float4(scratch<const float>(me.p, AT_VALUES) + (long long)at * HEAD_DIM + dim);
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const float both = fmaxf(peak, its_peak[j]);
          const float old = power_of_two(peak - both), its = power_of_two(its_peak[j] - both);
          total = total * old + its_total[j] * its;
          out[0] = out[0] * old + v[j].x * its, out[1] = out[1] * old + v[j].y * its;
          out[2] = out[2] * old + v[j].z * its, out[3] = out[3] * old + v[j].w * its;
          peak = both;
        }
      }
#pragma unroll
      for (int lanes = 1; lanes < 8; lanes <<= 1) {
        const float its_peak = shuffle(peak, lanes), both = fmaxf(peak, its_peak), f = power_of_two(peak - both);
        total *= f;
        total += shuffle(total, lanes);
#pragma unroll
        for (int j = 0; j < 4; j++) {
          out[j] *= f;
          out[j] += shuffle(out[j], lanes);
        }
        peak = both;
      }
      if (me.tid % 8 || begin + me.tid / 8 >= items) continue;
      const float f = inverse(total);
#pragma unroll
      for (int j = 0; j < 4; j++) out[j] *= f;
      const int row = sequence * turn.rows + line / QUERIES;
      const int k = ((head * QUERIES + line % QUERIES) * HEAD_DIM + dim) * EACH;
      u8* to = scratch<u8>(me.p, AT_ATTENDED) + activation_at(m, k, row);
      if constexpr (HAS_FP8)
        *(u32*)to = four_fp8(out, factor);
      else
        put_4(to, out);
    }
  }
  order_global();
  sync_consumers();
  if (me.tid == 0) arrive_for_all(me);
  me.barrier++;
}

// -------------------------------------------------------------------------------------------------- the consumer warps

DEVICE void consume(Self& me) {
#pragma unroll 1
  for (int step = 0; step < me.p.steps; step++) {
    const Turn turn = turn_of(me.p, step);
    begin_turn(me, turn);
#pragma unroll 1
    for (int i = 0; i <= me.p.layers * 4; i++) {
      const int layer = i / 4, matrix = layer == me.p.layers ? HEAD : i % 4;
      begin_phase(me, i);
      if (matrix == O) {
        stamp(me, O_WAITS);
        attend(me, turn, layer);
        stamp(me, O_MERGES);
        begin_phase(me, i);
        merge(me, turn, layer);
      } else if (matrix != DOWN) {
        prepare_input(me, turn, layer, matrix);
      }
      const int starts = matrix == HEAD   ? HEAD_STARTS
                         : matrix == QKV  ? QKV_STARTS
                         : matrix == O    ? O_STARTS
                         : matrix == DOWN ? DOWN_STARTS
                                          : GATE_UP_STARTS;
      stamp(me, starts);
      begin_phase(me, i);
      multiply_any(me, matrix);
      stamp(me, starts + 1);
      if (matrix == DOWN) keep_stamps(me, layer);
    }
  }
}

// ------------------------------------------------------------------------------------------ producer warp: all weights

DEVICE void produce(Self& me) {
  const u64 policy = read_once_policy();
#pragma unroll 1
  for (int step = 0; step < me.p.steps; step++) {
#pragma unroll 1
    for (int i = 0; i <= me.p.layers * 4; i++) {
      const bool is_head = i == me.p.layers * 4;
      const Shape& m = all_shapes.of[is_head ? HEAD : i % 4];
      const int bytes = 64 * m.width, count = share_of(m, me.block()) * m.tiles;
      const long long first = (long long)me.block() * (m.groups / BLOCKS) + least(me.block(), m.groups % BLOCKS);
      const u8* from = (const u8*)(is_head ? me.p.head : ((const u64*)me.p.weights)[i]) + first * m.tiles * bytes;
      shared().phase[me.warp] = i;
#pragma unroll 1
      for (int tile = 0; tile < count; tile++) {
        const u32 bar = shared_address(&shared().empty[me.slot]), full = shared_address(&shared().full[me.slot]);
        const u32 parity = me.parity ^ 1;
        wait(me, FOR_ROOM_IN_THE_RING, me.tile, [=] { return barrier_passed(bar, parity); });
        if (me.lost) {
          pause_us(1000);  // the copies that are under way need their place
          return;
        }
        barrier_arrive_expecting(full, bytes);
        copy_once(slot_address(me.slot), from, bytes, full, policy);
        from += bytes;
        next_slot(me);
      }
    }
  }
}

// ----------------------------------------------------------------------- loader warp: activations that come with tiles

DEVICE void load(Self& me) {
#pragma unroll 1
  for (int step = 0; step < me.p.steps; step++) {
#pragma unroll 1
    for (int i = 0; i <= me.p.layers * 4; i++) {
      const int matrix = i == me.p.layers * 4 ? HEAD : i % 4;
      const Shape& m = all_shapes.of[matrix];
      const int groups = share_of(m, me.block()), bytes = m.activation_bytes();
      if (matrix == O || (matrix != DOWN && m.streamed)) me.barrier++;  // that the consumers arrive at
      const u8* from = scratch<const u8>(me.p, matrix == O ? AT_ATTENDED : matrix == DOWN ? AT_GATED : AT_NORMED);
      shared().phase[me.warp] = i;
      if (m.streamed && groups) {
        wait_for_blocks(me);
        order_global();
      }
#pragma unroll 1
      for (int tile = 0; tile < groups * m.tiles; tile++) {
        const u32 bar = shared_address(&shared().empty[me.slot]), full = shared_address(&shared().full[me.slot]);
        const u32 parity = me.parity ^ 1;
        wait(me, FOR_ROOM_IN_THE_RING, me.tile, [=] { return barrier_passed(bar, parity); });
        if (me.lost) {
          pause_us(1000);
          return;
        }
        if (m.streamed) {
          barrier_arrive_expecting(full, bytes);
          copy_shared(slot_address(me.slot) + TILE_BYTES, from + tile % m.tiles * bytes, bytes, full);
        } else {
          barrier_arrive(full);
        }
        next_slot(me);
      }
      me.barrier++;
    }
  }
}

// ------------------------------------------------------------------------------ epilogue warps: what sums are good for

// Partial sums of 16 rows of the matrix (block `of16` of a group) for rows 8 `column` ... of the step, in their one
// order: c[0], c[1] row g, c[2], c[3] row g + 8, for two rows of the step each.
DEVICE void sums_of(Self& me, const float* slab, const Shape& m, int of16, int column, float* c) {
  c[0] = c[1] = c[2] = c[3] = 0;
  const int row = column * 8 + 2 * me.t(), turns = least(m.tiles, 4);
  const int first = m.group == 64 ? of16 : 0, last = m.group == 64 ? of16 + 1 : 4;
  if (row >= ROWS) return;
#pragma unroll 1
  for (int quarter = first; quarter < last; quarter++) {
    const float* at = slab + quarter * 4 * (ROWS * 20) + row * 20 + me.g();
#pragma unroll
    for (int turn = 0; turn < 4; turn++, at += ROWS * 20)
      if (turn < turns) {
        c[0] += at[0];
        c[1] += at[20];
        c[2] += at[8];
        c[3] += at[28];
      }
  }
}

// For this block's groups of a matrix, as their sums come: each of the two warps takes 32 rows of a group of 64, or
// every other group of 16. scales: of the matrix's rows, or none; they are read while the sums are not there yet.
// make(block of 16 rows in the stream, the same among this block's own, column, sums, scales of rows g and g + 8).
template <class Make>
DEVICE void drain(Self& me, const Shape& m, const float* scales, float input_scale, Make make) {
  const int warp = me.warp & 1, groups = share_of(m, me.block()), sixteenths = m.group / 16;
#pragma unroll 1
  for (int group = 0; group < groups; group++) {
    const u32 slab = me.unit % SLABS, turn = me.unit / SLABS;
    const bool is_ours = m.group == 64 || (int)(me.unit & 1) == warp;
    const int first = m.group == 64 ? 2 * warp : 0, end = m.group == 64 ? first + 2 : is_ours;
    const int in_stream = (group * BLOCKS + me.block()) * sixteenths;
    float scale[2][2] = {{1, 1}, {1, 1}};
    if (scales) {
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (first + i / 2 < end) scale[i / 2][i % 2] = scales[(in_stream + first) * 16 + i * 8 + me.g()] * input_scale;
    }
    me.unit++;
    const u32 bar = shared_address(&shared().slab_full[slab]);
    wait(me, FOR_SUMS, me.unit, [=] { return barrier_passed(bar, turn & 1); });
    sync_warp();
    const float* sums = (const float*)(shared_base() + SLAB + slab * SLAB_BYTES);
#pragma unroll 1
    for (int part = first * COLUMN_TILES; part < end * COLUMN_TILES; part++) {
      const int b = part / COLUMN_TILES, column = part % COLUMN_TILES;
      const float its[2] = {b == first ? scale[0][0] : scale[1][0], b == first ? scale[0][1] : scale[1][1]};
      float c[4];
      sums_of(me, sums, m, b, column, c);
      make(in_stream + b, group * sixteenths + b, column, c, its);
    }
    sync_warp();
    if (me.lane() == 0) barrier_arrive(shared_address(&shared().slab_free[slab]));
  }
}

// All that this block makes of a matrix is written: tell the others. Who had nothing to do waits for the barrier
// before, or the count would run ahead of it. blocks: of 16 rows of h that are this block's; their squares go out
// together.
DEVICE void made(Self& me, const Turn& turn, int groups, int matrix, int blocks) {
  if (matrix == GATE_UP) order_global();
  sync_some<2, 64>();
  if (me.warp == 18) {
    if ((matrix == O || matrix == DOWN) && blocks && me.lane() < turn.count) {
      float sum = 0;
      for (int own = 0; own < blocks; own++) sum += shared().squares[own][me.lane()];
      put_far_float(scratch<float>(me.p, AT_SQUARES) + me.lane() * BLOCKS + me.block(), sum);
    }
    sync_warp();
    if (me.lane() == 0) {
      if (groups == 0) wait_for_blocks(me);
      arrive_for_all(me);
    }
  }
  me.barrier++;
}

DEVICE void put_qkv(Self& me, const Turn& turn, int layer, int block, int column, const float* c, const float* scale) {
  const u16* bias = (const u16*)me.p.qkv_bias + (long long)layer * QKV_ROWS;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int in_stream = block * 16 + half * 8 + me.g(), head = in_stream / HEAD_DIM;
    const int natural =
        head >= HEADS + KV_HEADS ? in_stream : head * HEAD_DIM + half * HALF + in_stream % HEAD_DIM / 16 * 8 + me.g();
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = column * 8 + 2 * me.t() + i;
      if (row >= turn.count) continue;
      const float v = c[2 * half + i] * scale[half] + (me.p.qkv_bias ? bf16_to_float(bias[natural]) : 0.0f);
      put_far_float(scratch<float>(me.p, AT_QKV) + row * QKV_ROWS + natural, v);
    }
  }
}

// h += sum, in bf16 as it is kept; its squares for the next norm.
DEVICE void put_residual(Self& me, const Turn& turn, int block, int own, int column, const float* c,
                         const float* scale) {
  float* kept = shared().residual[(own * COLUMN_TILES + column) * 32 + me.lane()];
  float squares[2] = {};
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int feature = block * 16 + half * 8 + me.g();
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = column * 8 + 2 * me.t() + i;
      const u16 h = float_to_bf16(kept[2 * half + i] + c[2 * half + i] * scale[half]);
      const float v = bf16_to_float(h);
      kept[2 * half + i] = v;
      squares[i] += v * v;
      if (row < turn.count) scratch<u16>(me.p, AT_H)[row * HIDDEN + feature] = h;
    }
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes <<= 1) squares[i] += shuffle(squares[i], lanes);
    if (me.g() == 0) shared().squares[own][column * 8 + 2 * me.t() + i] = squares[i];
  }
}
// SiLU(gate) * up, the input of down. factor: 1 / its scale.
DEVICE void put_gated(Self& me, const Turn& turn, float factor, int block, int column, const float* c,
                      const float* scale) {
  constexpr Shape m = ALL.of[DOWN];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = column * 8 + 2 * me.t() + i;
    if (row >= turn.count) continue;
    const float gate = c[i] * scale[0], up = c[2 + i] * scale[1],
                v = gate * inverse(1.0f + power_of_two(gate * -LOG2_E)) * up;
    u8* to = scratch<u8>(me.p, AT_GATED) + activation_at(m, (block * 8 + me.g()) * EACH, row);
    if constexpr (HAS_FP8)
      *to = (u8)two_fp8(v * factor, 0);
    else
      *(u16*)to = float_to_bf16(v);
  }
}

DEVICE void put_logits(Self& me, const Turn& turn, int block, int column, const float* c, const float* scale,
                       u64 best[2][2]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int token = block * 16 + half * 8 + me.g();
    if (token >= ALL.of[HEAD].rows) continue;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = column * 8 + 2 * me.t() + i;
      if (row >= turn.count) continue;
      const float logit = c[2 * half + i] * (HAS_FP8_HEAD ? scale[half] * shared().scale[row] : 1.0f);
      if (me.p.logits) ((float*)me.p.logits)[(long long)row * ALL.of[HEAD].rows + token] = logit;
      const u64 choice = token < me.p.vocab_limit ? choice_of(logit, token) : 0;
#pragma unroll
      for (int of = 0; of < COLUMN_TILES; of++)
        if (of == column && choice > best[of][i]) best[of][i] = choice;
    }
  }
}

DEVICE void finish(Self& me) {
#pragma unroll 1
  for (int step = 0; step < me.p.steps; step++) {
    const Turn turn = turn_of(me.p, step);
    const Shape& o = all_shapes.of[O];
    const int groups = share_of(o, me.block()), sixteenths = o.group / 16;
    begin_phase(me, 0);
    if (step) {  // the tokens are known
      if (me.lane() == 0) wait_for_blocks(me);
      sync_warp();
    }
#pragma unroll 1
    for (int own = me.warp & 1; own < groups * sixteenths; own += 2) {
      const int block = (own / sixteenths * BLOCKS + me.block()) * sixteenths + own % sixteenths;
#pragma unroll 1
      for (int column = 0; column < COLUMN_TILES; column++) {
        float* kept = shared().residual[(own * COLUMN_TILES + column) * 32 + me.lane()];
        for (int i = 0; i < 4; i++) {
          const int row = column * 8 + 2 * me.t() + i % 2, feature = block * 16 + i / 2 * 8 + me.g();
          const u16* h = (const u16*)me.p.embedding + feature;
          kept[i] = row < turn.count ? bf16_to_float(h[(long long)token_of(me.p, turn, row) * HIDDEN]) : 0.0f;
        }
      }
    }
    sync_some<2, 64>();
#pragma unroll 1
    for (int layer = 0; layer < me.p.layers; layer++) {
#pragma unroll 1
      for (int matrix = QKV; matrix <= DOWN; matrix++) {
        const Shape& m = all_shapes.of[matrix];
        begin_phase(me, layer * 4 + matrix);
        if (matrix == O || (matrix != DOWN && m.streamed)) me.barrier++;  // that the consumers arrive at
        const float* scales = HAS_FP8 ? (const float*)((const u64*)me.p.scales)[layer * 4 + matrix] : nullptr;
        const float input = HAS_FP8 ? ((const float*)me.p.input_scales)[layer * 4 + matrix] : 1.0f;
        const float factor =
            HAS_FP8 && matrix == GATE_UP ? inverse(((const float*)me.p.input_scales)[layer * 4 + DOWN]) : 1.0f;
        drain(me, m, scales, input, [&](int block, int own, int column, const float* c, const float* scale) {
          if (matrix == QKV) put_qkv(me, turn, layer, block, column, c, scale);
          if (matrix == O || matrix == DOWN) put_residual(me, turn, block, own, column, c, scale);
          if (matrix == GATE_UP) put_gated(me, turn, factor, block, column, c, scale);
        });
        made(me, turn, share_of(m, me.block()), matrix, groups * sixteenths);
      }
    }
    begin_phase(me, me.p.layers * 4);
    if (all_shapes.of[HEAD].streamed) me.barrier++;
    u64 best[2][2] = {};
    drain(me, all_shapes.of[HEAD], HAS_FP8_HEAD ? (const float*)me.p.head_scale : nullptr, 1,
          [&](int block, int, int column, const float* c, const float* scale) {
            put_logits(me, turn, block, column, c, scale, best);
          });
#pragma unroll
    for (int column = 0; column < COLUMN_TILES; column++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        u64 choice = best[column][i];
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes <<= 1) {
          const u64 other = (u64)shuffle((u32)(choice >> 32), lanes) << 32 | shuffle((u32)choice, lanes);
          choice = other > choice ? other : choice;
        }
        const int row = column * 8 + 2 * me.t() + i;
        if (me.g() == 0 && row < turn.count && choice) raise_to(choices_at(me.p, step) + row, choice);
      }
    made(me, turn, share_of(all_shapes.of[HEAD], me.block()), HEAD, 0);
  }
  if (me.block() || me.warp != 18) return;  // one warp of one block tells what was chosen
  if (me.lane() == 0) wait_for_blocks(me);
  sync_warp();
  for (int step = 0; step < me.p.steps; step++) {
    const Turn turn = turn_of(me.p, step);
    if (me.lane() >= turn.count) continue;
    const u64 choice = far_u64(choices_at(me.p, step) + me.lane());
    const int rows = turn.rows, sequence = me.lane() / rows;
    int* out = (int*)me.p.choices;
    if (me.p.is_chain) {
      if (me.lane() % rows == rows - 1) out[step * me.p.sequences + sequence] = token_of_choice(me.p, choice);
    } else {
      out[me.lane()] = token_of_choice(me.p, choice);
      if (is_no_number(choice)) ((int*)me.p.damage)[me.lane() / me.p.damage_rows] = 1;
    }
  }
}

// ---------------------------------------------------------------------------------------------------------- the kernel

KERNEL step(PARAMETERS p) {
  Shared& s = shared();
  Self me = {p};
  me.tid = thread_index();
  me.warp = first_lane(me.tid >> 5);
  if (me.tid == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(shared_address(&s.full[i]), 2);    // producer and loader
      barrier_init(shared_address(&s.empty[i]), 16);  // consumer warps
    }
    for (int i = 0; i < 2; i++) {
      barrier_init(shared_address(&s.slab_full[i]), 16);
      barrier_init(shared_address(&s.slab_free[i]), 2);  // epilogue warps
    }
    barrier_init_done();
    order_shared();
    s.is_lost = read_volatile((const int*)p.trouble);
  }
  sync_block();
  if (s.is_lost) return;
  if (me.warp < 16) {
    const u64 begun = cycles(), begun_ns = nanoseconds();
    consume(me);
    stamp(me, END_CYCLES);
    if (me.tid == 0) s.stamps[BEGIN_CYCLES] = begun, s.stamps[BEGIN_NS] = begun_ns, s.stamps[END_NS] = nanoseconds();
    keep_stamps(me, p.layers);
  } else if (me.warp == 16) {
    if (me.lane() == 0) produce(me);
  } else if (me.warp == 17) {
    if (me.lane() == 0) load(me);
  } else {
    finish(me);
  }
}
