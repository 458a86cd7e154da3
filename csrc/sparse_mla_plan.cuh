// Constants, shared-memory plan, barrier table and parameters of the sparse MLA prefill kernel.
#pragma once

#include "layout.cuh"

namespace sparse_mla {

// ----------------------------------------------------------------------------------------------------------- constants

constexpr int D_V = 512;          // columns of V: the first of a KV row
constexpr int HEADS = 64;         // heads of one item: the M of scores, the N of O^T
constexpr int BLOCK_TOKENS = 64;  // tokens of one block: the N of scores, the K of O^T

constexpr int WARP_THREADS = 32;
constexpr int GROUP_WARPS = 4;
constexpr int GROUP_THREADS = GROUP_WARPS * WARP_THREADS;
constexpr int SCORERS = 2;       // warpgroups 0 and 1: blocks alternate between them
constexpr int ACCUMULATORS = 2;  // warpgroups 2 and 3: each owns 256 columns of d_v
constexpr int THREADS = (SCORERS + ACCUMULATORS) * GROUP_THREADS;

constexpr int SCORER_REGISTERS = 88;
constexpr int ACCUMULATOR_REGISTERS = 168;
constexpr int SM_REGISTERS = 65536;
static_assert(GROUP_THREADS * (SCORERS * SCORER_REGISTERS + ACCUMULATORS * ACCUMULATOR_REGISTERS) <= SM_REGISTERS,
              "roles: more registers than an SM has");

constexpr int KEY_STAGES = 4;    // one in PV, one scored, one in QK, one being filled
constexpr int QUERY_STAGES = 2;  // this item's Q and the next one's
constexpr int SCALE_STAGES = 4;  // items that may be finished before the accumulators read their scale
static_assert(KEY_STAGES % SCORERS == 0, "a key stage always belongs to the same scorer");

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
// n counts the blocks of a CTA, t its items. A stage index is n (or t) modulo the number of stages, a phase n (or t)
// divided by it. Scorer A is the one of block n (n % 2), scorer B the other one. "warps" arrive by their lane 0.
//
// | barrier        | arrivals | who arrives             | who waits                 | meaning                             |
// | query_full[t]  | 4 warps  | scorer of block 0       | both scorers              | Q of item t is in shared memory     |
// | query_empty[t] | 4 warps  | scorer of the last block| scorer that fetches t + 2 | all scores of item t are computed   |
// | frame_full[n]  | 4 warps  | A                       | B for n + 1, accumulators | maximum, reference, factors of n    |
// | p_full[n]      | 4 warps  | A                       | accumulators; B if it ends| P of block n (and A's part of sums) |
// | key_empty[n]   | 8 warps  | accumulators            | A before it fetches n + 4 | PV of n done: K, P, factors free    |
// | scale_full[t]  | 4 warps  | scorer of the last block| accumulators              | 1 / denominator of item t           |
//
// First phases: *_full start incomplete, *_empty are first waited for with the parity of a completed phase.

// ------------------------------------------------------------------------------------------------- shared-memory plan

struct Frame {
    float reference_log2;
    float maximum_log2;
};

template <int D_QK>
struct alignas(1024) SharedPlan {
    static constexpr int STAGE_BYTES = layout::Stage<D_QK>::BYTES;

    u8 keys[KEY_STAGES][STAGE_BYTES];
    u8 queries[QUERY_STAGES][STAGE_BYTES];
    u8 p[SCORERS][HEADS * BLOCK_TOKENS];
    Frame frame[SCORERS][HEADS];
    float factor[SCORERS][HEADS];       // 2^(old reference - new reference)
    float scale[SCALE_STAGES][HEADS];   // kv_scale / denominator
    float partial_sum[HEADS];           // of the scorer that does not end the item, in its last frame
    u8 raised[SCORERS][GROUP_WARPS];    // bit 0, 1: heads 16w..16w+7, 16w+8..16w+15 have a factor below 1
    u64 query_full[QUERY_STAGES];
    u64 query_empty[QUERY_STAGES];
    u64 frame_full[SCORERS];
    u64 p_full[SCORERS];
    u64 key_empty[KEY_STAGES];
    u64 scale_full[SCALE_STAGES];
};

constexpr int SM90_SHARED_BYTES = 232448;
static_assert(sizeof(SharedPlan<576>) <= SM90_SHARED_BYTES, "shared memory: more than a CTA may have");
static_assert(sizeof(SharedPlan<512>) <= SM90_SHARED_BYTES, "shared memory: more than a CTA may have");
static_assert(sizeof(SharedPlan<BUFPOOL_D_QK>) == BUFPOOL_SHARED_BYTES, "shared memory: not what the launch gives");
static_assert(layout::Stage<576>::BYTES % 1024 == 0 && layout::Stage<512>::BYTES % 1024 == 0, "stages: 1024-byte aligned");

// ---------------------------------------------------------------------------------------------------------- parameters
//
// bufpool/ops/sparse_mla_sm90.py packs this struct field by field: keep the order. First what changes from call to call,
// then what the shape fixes.

struct Params {
    const u8* q;              // [s_q, h_q, d_qk] e4m3, rows 16-byte aligned
    const u8* kv;             // [s_kv, d_qk] e4m3, rows 16-byte aligned
    const int* indices;       // [s_q, topk]
    const float* attn_sink;   // [h_q] or null
    const int* topk_length;   // [s_q] or null
    const float* q_scale_at;  // one element, or null: q_scale counts
    const float* kv_scale_at; // one element, or null: kv_scale counts
    u16* out;                 // [s_q, h_q, 512] bf16, contiguous
    float* max_logits;        // [s_q, h_q], contiguous
    float* lse;               // [s_q, h_q], contiguous
    float sm_scale;
    float q_scale;
    float kv_scale;
    int topk;
    i64 q_row_bytes;           // from one query to the next
    i64 q_head_bytes;          // from one head to the next
    i64 kv_row_bytes;          // from one token to the next
    i64 indices_row_elements;  // from one query to the next
    int s_kv;
    int h_q;
    int head_groups;  // h_q / 64, rounded up
    int items;        // s_q * head_groups
};

}  // namespace sparse_mla
