// Constants, shared-memory plan, barrier table and parameters of the sparse MLA prefill kernel.
#pragma once

#include "layout.cuh"

namespace sparse_mla {

// ----------------------------------------------------------------------------------------------------------- constants

constexpr int D_V = 512;          // columns of V: the first of a KV row
constexpr int HEADS = 64;         // heads of one item: the M of scores, the N of O^T
constexpr int BLOCK_TOKENS = 64;  // tokens of one block: the N of scores, the K of O^T
constexpr int PAIR_TOKENS = 2 * BLOCK_TOKENS;

constexpr int WARP_THREADS = 32;
constexpr int GROUP_WARPS = 4;
constexpr int GROUP_THREADS = GROUP_WARPS * WARP_THREADS;
constexpr int SCORER = 0;             // warpgroup
constexpr int FIRST_ACCUMULATOR = 1;  // warpgroups 1 and 2: each owns 256 columns of d_v
constexpr int ACCUMULATORS = 2;
constexpr int LOADER = 3;
constexpr int THREADS = 4 * GROUP_THREADS;

constexpr int SCORER_REGISTERS = 136;
constexpr int ACCUMULATOR_REGISTERS = 168;
constexpr int LOADER_REGISTERS = 40;
constexpr int SM_REGISTERS = 65536;
static_assert(GROUP_THREADS * (SCORER_REGISTERS + ACCUMULATORS * ACCUMULATOR_REGISTERS + LOADER_REGISTERS) <= SM_REGISTERS,
              "roles: more registers than an SM has");

// Lanes of a warp that arrive at a barrier. One; with 32 the race checker of compute-sanitizer, which does not see that a
// converged warp needs no instruction to synchronise, can follow what is handed over.
constexpr u32 ARRIVING_LANES = BUFPOOL_ARRIVING_LANES;
constexpr u32 GROUP_ARRIVALS = GROUP_WARPS * ARRIVING_LANES;

constexpr int STAGES = 5;  // blocks between the loader's gather and the accumulators' last read: as many as fit
constexpr int SLOTS = 2;   // pairs of blocks between the scorer's P and the accumulators' last read of it

// k-steps of Q that the scorer keeps in registers: as many as fit beside the scores of a pair; it reads the others from
// shared memory for every block.
constexpr int Q_REGISTER_STEPS = 11;

// The d_qk whose loader has registers and time to ask for rows in L2 before it copies them.
constexpr int PREFETCHED_D_QK = 512;

// The epilogue of an accumulator warp goes through shared memory, four heads of its 64 columns at a time.
constexpr int STAGED_HEADS = 4;
constexpr int STAGED_ROW_BYTES = 64 * 2;

// P = 2^(s - reference). The reference trails the running maximum: it is raised to (maximum - HEADROOM_LOG2) only when
// the maximum has risen by more than RISE_LOG2, so P stays below 2^(HEADROOM_LOG2 + RISE_LOG2) and within e4m3.
constexpr float HEADROOM_LOG2 = 8.0f;
constexpr float RISE_LOG2 = 0.5f;
constexpr float E4M3_MAX = 448.0f;  // 2^8.807
static_assert(HEADROOM_LOG2 + RISE_LOG2 < 8.807f, "P: beyond the largest e4m3");

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
constexpr float NO_REFERENCE_LOG2 = -3.0e38f;  // finite: -inf - NO_REFERENCE is -inf, never NaN
constexpr float SMALLEST_SCALE = 1.1754944e-38f;

// ------------------------------------------------------------------------------------------------------------ barriers
//
// n counts the blocks of a CTA, m = n / 2 their pairs, t its items. The stage of block n is n % STAGES, its phase
// n / STAGES; the slot of pair m is m % 2, its phase m / 2. "Warps" arrive by one lane.
//
// | barrier        | arrivals              | who arrives  | who waits    | meaning                                       |
// |----------------|-----------------------|--------------|--------------|-----------------------------------------------|
// | query_full     | 128 threads           | loader       | scorer       | the loader's part of Q of item t is there     |
// | query_empty    | 4 warps               | scorer       | loader       | the last QK of item t is done                 |
// | key_full[n]    | 128 threads + 4 warps | loader       | scorer       | K of block n and its valid places are there   |
// | factor_full[m] | 4 warps               | scorer       | accumulators | factors and flags of pair m are there         |
// | p_full[m]      | 4 warps               | scorer       | accumulators | P of m may be used; if m ends an item, scale  |
// | stage_empty[n] | 8 warps               | accumulators | loader       | V^T of n is in registers: K may be replaced   |
// | p_empty[m]     | 8 warps               | accumulators | scorer       | PV of m done; so with factors, flags, scale   |
//
// The *_full barriers start incomplete; the *_empty ones are first waited for with the parity of a completed phase.

// ------------------------------------------------------------------------------------------------- shared-memory plan

template <int D_QK>
struct alignas(1024) SharedPlan {
    static constexpr int STAGE_BYTES = layout::Stage<D_QK>::BYTES;
    // The first wide tiles of Q, which the scorer reads from memory into its registers: where shared memory is short.
    static constexpr int DIRECT_TILES = D_QK == 512 ? 0 : 2;
    static constexpr int DIRECT_BYTES = DIRECT_TILES * layout::WIDE_TILE_BYTES;

    u8 keys[STAGES][STAGE_BYTES];
    u8 queries[STAGE_BYTES - DIRECT_BYTES];  // a stage without its first tiles
    u8 p[SLOTS][2][HEADS * BLOCK_TOKENS];
    u8 staging[ACCUMULATORS * GROUP_WARPS][2][STAGED_HEADS][STAGED_ROW_BYTES];
    float factor[SLOTS][HEADS];      // 2^(old reference - new reference)
    float scale[SLOTS][HEADS];       // kv_scale / denominator, of the item that pair m ends
    u16 valid[STAGES][GROUP_WARPS];  // one bit for each place of the block that holds a row of kv
    u8 raised[SLOTS][GROUP_WARPS];   // bit 0, 1: heads 16w..16w+7, 16w+8..16w+15 have a factor below 1
    u64 query_full;
    u64 query_empty;
    u64 key_full[STAGES];
    u64 factor_full[SLOTS];
    u64 p_full[SLOTS];
    u64 stage_empty[STAGES];
    u64 p_empty[SLOTS];
};

constexpr int SM90_SHARED_BYTES = 232448;
static_assert(sizeof(SharedPlan<576>) <= SM90_SHARED_BYTES, "shared memory: more than a CTA may have");
static_assert(sizeof(SharedPlan<512>) <= SM90_SHARED_BYTES, "shared memory: more than a CTA may have");
static_assert(sizeof(SharedPlan<BUFPOOL_D_QK>) == BUFPOOL_SHARED_BYTES, "shared memory: not what the launch gives");
static_assert(layout::Stage<576>::BYTES % 1024 == 0 && layout::Stage<512>::BYTES % 1024 == 0 &&
                  SharedPlan<576>::DIRECT_BYTES % 1024 == 0 && SharedPlan<512>::DIRECT_BYTES % 1024 == 0,
              "stages: 1024-byte aligned");

// ---------------------------------------------------------------------------------------------------------- parameters
//
// bufpool/ops/sparse_mla_sm90.py packs this struct field by field: keep the order. First what changes from call to call,
// then what the shape fixes.

struct Params {
    const u8* q;               // [s_q, h_q, d_qk] e4m3, rows 16-byte aligned
    const u8* kv;              // [s_kv, d_qk] e4m3, rows 16-byte aligned
    const int* indices;        // [s_q, topk]
    const float* attn_sink;    // [h_q] or null
    const int* topk_length;    // [s_q] or null
    const float* q_scale_at;   // one element, or null: q_scale counts
    const float* kv_scale_at;  // one element, or null: kv_scale counts
    u16* out;                  // [s_q, h_q, 512] bf16, contiguous
    float* max_logits;         // [s_q, h_q], contiguous
    float* lse;                // [s_q, h_q], contiguous
    float sm_scale;
    float q_scale;
    float kv_scale;
    int items;                 // s_q * head_groups
    i64 q_row_bytes;           // from one query to the next
    i64 q_head_bytes;          // from one head to the next
    i64 indices_row_elements;  // from one query to the next
    u32 kv_row_bytes;          // from one token to the next
    int s_kv;
    int h_q;
    int head_groups;  // h_q / 64, rounded up
    int topk;
    int queries_per_turn;  // SMs / head_groups: from an item of a CTA to its next, where there is one
    int heads_per_turn;    // SMs % head_groups * 64
    int prefetches_keys;   // whether to ask for rows of kv in L2 a block before their gather
};

}  // namespace sparse_mla
