// Sparse MLA prefill over an FP8 cache, for SM90.
//
//   s[q, h, j]     = sm_scale q_scale kv_scale (q[q, h, :] . kv[indices[q, j], :])       j a valid place
//   max_logits     = max_j s                          lse = ln sum_j exp(s)              (natural logarithm, no sink)
//   out[q, h, :]   = kv_scale sum_j exp(s) kv[indices[q, j], :512] / (sum_j exp(s) + exp(attn_sink[h]))
//
// A place j is valid when j < topk_length[q] and 0 <= indices[q, j] < s_kv. A row without one: out 0, max_logits -inf,
// lse +inf. Shapes and strides: Params in sparse_mla_plan.cuh.
//
// Grid: min(items, SMs) CTAs of 512 threads, one per SM. An item is (query, 64 heads); CTA b does items b, b + grid, ...
// A block is 64 places of an item, a pair two blocks; an item is whole pairs, padded with empty places. n counts the blocks
// of a CTA over all its items, m the pairs. Data go one way, but that at d_qk 576 the scorer reads a part of Q itself:
//
// | role        | warpgroups | registers | work                                                                       |
// |-------------|------------|-----------|----------------------------------------------------------------------------|
// | loader      | 3          | 40        | gather 64 rows of kv into a key stage; once an item, its Q, or most of it  |
// | scorer      | 0          | 136       | S = Q K^T of a pair, Q mostly in registers; maximum, factors;              |
// |             |            |           | P = 2^(s - reference). d_qk 576: it reads Q's first 256 columns            |
// | accumulator | 1, 2       | 168       | O^T[256 of d_v, 64 heads] += V^T P^T of a pair, V^T out of its stages; out |
//
//   loader        | gather of m + 1, as PV(m - 1) leaves its stages .........................
//   scorer        | QK(m), both blocks ........ | softmax(m) ......................... | QK(m + 1) ...
//   accumulators    fragments, rescale .... | PV(m - 1) ......................  fragments, rescale | PV(m)
//
// The tensor cores take turns: P of m is released only when QK of m + 1 is nearly done, so PV(m) runs beside softmax(m + 1)
// and does not delay the scores that everything waits for. Within an item the gather runs half a pair further
// ahead than the picture shows: there are five key stages.
//
// Invariants
//   1. The scorer alone owns maximum and reference; P(m), the factors of m and O^T after PV(m) are in the same frame.
//   2. K of block n lives in stage n % STAGES until the accumulators hold the last of its V^T in registers; P, factors, flags and
//      scale of pair m live in slot m % 2 until PV(m) is done.
//   3. An empty place is zero-filled, never multiplied: NaN in rows nobody selects cannot reach a result.
//   4. wgmma reads what cp.async and stmatrix wrote only behind a fence.proxy.async: the scorer's before QK of a block
//      covers its K; that before the first block of m also covers P(m - 1) and, when m begins an item, Q.
//   5. Nothing depends on which CTA has an item, or on what that CTA did before.
#include "sparse_mla_plan.cuh"

using namespace sparse_mla;

// --------------------------------------------------------------------------------------------------------- small things

__device__ __forceinline__ float infinite() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void wait(const u64& barrier, u32 phase) {
    const u32 address = shared_address(&barrier);
    while (!ptx::mbarrier_try_wait(address, phase & 1)) {
    }
}

// Arrive for the warp, after all its lanes.
__device__ __forceinline__ void arrive(const u64& barrier, u32 lane) {
    __syncwarp();
    if (lane < ARRIVING_LANES) ptx::mbarrier_arrive(shared_address(&barrier));
}

template <int N>
__device__ __forceinline__ void hold(float (&registers)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) ptx::hold(registers[i]);
}

template <int N>
__device__ __forceinline__ void hold(u32 (&registers)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) ptx::hold(registers[i]);
}

__device__ __forceinline__ float q_scale_of(const Params& params) {
    return params.q_scale_at ? __ldg(params.q_scale_at) : params.q_scale;
}

__device__ __forceinline__ float kv_scale_of(const Params& params) {
    return params.kv_scale_at ? __ldg(params.kv_scale_at) : params.kv_scale;
}

// One item of the CTA. Items are numbered by query, then by head group.
struct Item {
    int index;
    int query;
    int first_head;
    int length;  // places of the query that may be valid

    __device__ __forceinline__ explicit Item(const Params& params) : index(blockIdx.x) {
        query = index / params.head_groups;
        first_head = (index - query * params.head_groups) * HEADS;
        read_length(params);
    }

    // Go to the CTA's next item: gridDim.x items on.
    __device__ __forceinline__ void advance(const Params& params) {
        move(params);
        read_length(params);
    }

    // The same, without its length.
    __device__ __forceinline__ void move(const Params& params) {
        index += gridDim.x;
        query += params.queries_per_turn;
        first_head += params.heads_per_turn;
        if (first_head >= params.head_groups * HEADS) {
            first_head -= params.head_groups * HEADS;
            ++query;
        }
    }

    __device__ __forceinline__ void read_length(const Params& params) {
        length = params.topk;
        if (params.topk_length && is_active(params)) length = min(max(__ldg(params.topk_length + query), 0), params.topk);
    }

    __device__ __forceinline__ bool is_active(const Params& params) const { return index < params.items; }

    // Pairs of blocks of the item; one without places still takes one empty pair.
    __device__ __forceinline__ int pairs() const { return max((length + PAIR_TOKENS - 1) / PAIR_TOKENS, 1); }
};

// The place in a ring of SIZE, and the phase, of the next block or pair.
template <u32 SIZE>
struct Ring {
    u32 at = 0;
    u32 phase = 0;

    __device__ __forceinline__ void advance() {
        if (++at == SIZE) {
            at = 0;
            phase ^= 1;
        }
    }
};

// The stages of a pair's two blocks.
struct PairStages {
    Ring<STAGES> first;
    Ring<STAGES> second;

    // Those of the next pair; `stage` is the next one of all.
    __device__ __forceinline__ static PairStages next(Ring<STAGES>& stage) {
        PairStages pair;
        pair.first = stage;
        stage.advance();
        pair.second = stage;
        stage.advance();
        return pair;
    }

    // How many stages the second block is behind the first; below 0 where the ring begins anew in between.
    __device__ __forceinline__ int distance() const { return second.at != 0 ? 1 : 1 - STAGES; }
};

// -------------------------------------------------------------------------------------------------------------- loader

// A lane's part in the copies of a stage: wide tiles take 4 rows x 128 B per instruction, the tail 8 rows x 64 B. A warp
// copies rows 16w to 16w + 15.
struct CopyLane {
    u32 wide_row;     // of 4
    u32 wide_column;  // bytes
    u32 wide_offset;  // in the stage, of row 16w + wide_row; in odd groups of 4 rows chunk bit 2 is flipped
    u32 tail_row;     // of 8: wide_row, or wide_row + 4 for every other four lanes, so that a lane knows its row already
    u32 tail_column;  // bytes, from the tail's first
    u32 tail_offset;  // in the tail tile, of row 16w + tail_row

    __device__ __forceinline__ CopyLane(u32 warp, u32 lane)
        : wide_row(lane / 8),
          wide_column(lane % 8 * 16),
          wide_offset(layout::wide_offset(16 * warp + lane / 8, lane % 8)),
          tail_row(lane / 8 + lane / 4 % 2 * 4),
          tail_column(lane % 4 * 16),
          tail_offset(layout::narrow_offset(16 * warp + tail_row, lane % 4)) {}
};
constexpr u32 ODD_ROWS_FLIP = 4 * 16;

// The same address in a register of its own, where ptxas cannot split it (see ptx::cp_async_16).
__device__ __forceinline__ u32 opaque(u32 address) { return __shfl_sync(~0u, address, threadIdx.x % WARP_THREADS); }

// Ask for the item's heads of q in L2: two threads a row.
template <int D_QK>
__device__ __forceinline__ void prefetch_queries(const Params& params, const Item& item, u32 thread) {
    const int head = item.first_head + thread / 2;
    if (!item.is_active(params) || head >= params.h_q) return;
    constexpr int LINE_BYTES = 128;  // of L2
    const u8* row = params.q + item.query * params.q_row_bytes + head * params.q_head_bytes;
#pragma unroll
    for (int column = 0; column < D_QK; column += 2 * LINE_BYTES) {
        const int mine = column + thread % 2 * LINE_BYTES;
        if (mine < D_QK) ptx::prefetch_l2(row + mine);
    }
}

// Where the query stage would begin if it had its first DIRECT_TILES.
template <int D_QK>
__device__ __forceinline__ u32 query_stage(const SharedPlan<D_QK>& shared) {
    return shared_address(shared.queries) - SharedPlan<D_QK>::DIRECT_BYTES;
}

// Copy the item's 64 heads of q into the query stage, but for its first DIRECT_TILES; heads beyond h_q become zeros.
template <int D_QK>
__device__ __forceinline__ void fetch_queries(const Params& params, const Item& item, u32 warp, const CopyLane& lane,
                                              u32 stage) {
    using Stage = layout::Stage<D_QK>;
    const u64 policy = ptx::createpolicy_evict_first();
    const u8* query = params.q + item.query * params.q_row_bytes;
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
        const int head = item.first_head + 16 * warp + 4 * i + lane.wide_row, heads_behind = params.h_q - 1 - head;
        const u8* source = query + min(head, params.h_q - 1) * params.q_head_bytes + lane.wide_column;
        const u32 to = opaque(stage + ((lane.wide_offset + i * 4 * layout::WIDE_COLUMNS) ^ (i & 1 ? ODD_ROWS_FLIP : 0)));
#pragma unroll
        for (int tile = SharedPlan<D_QK>::DIRECT_TILES; tile < Stage::WIDE_TILES; ++tile)
            ptx::cp_async_16(to + tile * layout::WIDE_TILE_BYTES, source + tile * layout::WIDE_COLUMNS, heads_behind,
                             policy);
    }
    if constexpr (Stage::HAS_TAIL) {
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
            const int head = item.first_head + 16 * warp + 8 * i + lane.tail_row, heads_behind = params.h_q - 1 - head;
            const u8* source =
                query + min(head, params.h_q - 1) * params.q_head_bytes + (D_QK - layout::TAIL_COLUMNS) + lane.tail_column;
            const u32 to = opaque(stage + Stage::TAIL_OFFSET + lane.tail_offset + i * 8 * layout::TAIL_COLUMNS);
            ptx::cp_async_16(to, source, heads_behind, policy);
        }
    }
}

// Ask for the warp's 16 rows of kv in L2: two lanes a row. `index` is that of place 16w + lane % 16.
template <int D_QK>
__device__ __forceinline__ void prefetch_keys(const Params& params, int index, u32 lane) {
    if (static_cast<u32>(index) >= static_cast<u32>(params.s_kv)) return;
    constexpr int LINE_BYTES = 128;  // of L2
    const u8* row = params.kv + static_cast<u64>(static_cast<u32>(index)) * params.kv_row_bytes;
#pragma unroll
    for (int column = 0; column < D_QK; column += 2 * LINE_BYTES) {
        const int mine = column + lane / 16 * LINE_BYTES;
        if (mine < D_QK) ptx::prefetch_l2_evict_last(row + mine);
    }
}

// Copy the warp's 16 rows of kv into a key stage. `token` is the row of place 16w + lane % 16, below 0 for none;
// `destination` the stage's address plus lane.wide_offset, opaque.
template <int D_QK>
__device__ __forceinline__ void gather_keys(const Params& params, int token, const CopyLane& lane, u32 destination,
                                            u64 policy) {
    using Stage = layout::Stage<D_QK>;
    // All shuffles first: one behind copies would wait until the memory system has taken those.
    int rows[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) rows[i] = __shfl_sync(~0u, token, 4 * i + lane.wide_row);
    const u32 flip = (destination ^ ODD_ROWS_FLIP) - destination;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u8* source = params.kv + lane.wide_column + static_cast<u64>(static_cast<u32>(rows[i])) * params.kv_row_bytes;
        const u32 to = destination + (i & 1 ? flip : 0) + i * 4 * layout::WIDE_COLUMNS;
#pragma unroll
        for (int tile = 0; tile < Stage::WIDE_TILES; ++tile)
            ptx::cp_async_16(to + tile * layout::WIDE_TILE_BYTES, source + tile * layout::WIDE_COLUMNS, rows[i], policy);
    }
    if constexpr (Stage::HAS_TAIL) {
        const u32 to = destination + (Stage::TAIL_OFFSET + lane.tail_offset - lane.wide_offset);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = lane.tail_row == lane.wide_row ? rows[2 * i] : rows[2 * i + 1];
            const u8* source = params.kv + (D_QK - layout::TAIL_COLUMNS) + lane.tail_column +
                               static_cast<u64>(static_cast<u32>(row)) * params.kv_row_bytes;
            ptx::cp_async_16(to + i * 8 * layout::TAIL_COLUMNS, source, row, policy);
        }
    }
}

// Keep the key stages filled, and the query stage.
template <int D_QK>
__device__ __forceinline__ void loader(const Params& params, SharedPlan<D_QK>& shared) {
    ptx::setmaxnreg_dec<LOADER_REGISTERS>();
    const u32 thread = threadIdx.x % GROUP_THREADS, lane = thread % WARP_THREADS;
    const u32 warp = __shfl_sync(~0u, thread / WARP_THREADS, 0);
    const CopyLane copy(warp, lane);
    const u64 policy = ptx::createpolicy_evict_last();
    u32 destination = opaque(shared_address(shared.keys) + copy.wide_offset);

    Ring<STAGES> stage;
    Item item(params);
    const int my_place = 16 * warp + lane % 16;
    int places_left = item.length;
    const int* indices = params.indices + item.query * params.indices_row_elements;
    int index = item.is_active(params) && my_place < places_left ? __ldg(indices + my_place) : -1;
    bool is_new = true, is_second = false;
    for (u32 query_phase = 0; item.is_active(params);) {
        // Fetch Q of a new item, once the scorer is done with the last one.
        if (is_new) {
            wait(shared.query_empty, query_phase ^ 1);
            fetch_queries<D_QK>(params, item, warp, copy, query_stage(shared));
            ptx::cp_async_mbarrier_arrive(shared_address(&shared.query_full));
            query_phase ^= 1;
        }

        // Read the indices of the next block during this one. An item ends with the second block of a pair.
        const int token = static_cast<u32>(index) < static_cast<u32>(params.s_kv) ? index : -1;
        is_new = places_left <= BLOCK_TOKENS && is_second;
        is_second = !is_second;
        if (is_new) {
            item.advance(params);
            if constexpr (D_QK == PREFETCHED_D_QK) prefetch_queries<D_QK>(params, item, thread);
            places_left = item.is_active(params) ? item.length : 0;
            indices = params.indices + item.query * params.indices_row_elements;
        } else {
            places_left -= BLOCK_TOKENS;
            indices += BLOCK_TOKENS;
        }
        index = my_place < places_left ? __ldg(indices + my_place) : -1;

        // Gather K of this block, once the accumulators have left the stage.
        const u32 valid = __ballot_sync(~0u, token >= 0);
        wait(shared.stage_empty[stage.at], stage.phase ^ 1);
        if (lane == 0) {
            shared.valid[stage.at][warp] = static_cast<u16>(valid);
            ptx::mbarrier_arrive(shared_address(&shared.key_full[stage.at]));
        }
        gather_keys<D_QK>(params, token, copy, destination, policy);
        ptx::cp_async_mbarrier_arrive(shared_address(&shared.key_full[stage.at]));
        if constexpr (D_QK == PREFETCHED_D_QK)
            if (params.prefetches_keys) prefetch_keys<D_QK>(params, index, lane);
        stage.advance();
        destination = stage.at != 0 ? destination + SharedPlan<D_QK>::STAGE_BYTES
                                    : destination - (STAGES - 1) * SharedPlan<D_QK>::STAGE_BYTES;
    }
    ptx::cp_async_wait_all();
}

// -------------------------------------------------------------------------------------------------------------- scorer

// The k-steps of Q that come from memory.
template <int D_QK>
constexpr int DIRECT_STEPS = SharedPlan<D_QK>::DIRECT_BYTES / (64 * layout::K_STEP_BYTES);

// Read the first k-steps of an item's Q as wgmma's operand A: the warp's 16 heads.
template <int D_QK>
__device__ __forceinline__ void read_queries(u32 (&queries)[Q_REGISTER_STEPS][4], const Params& params, const Item& item,
                                             u32 warp, u32 lane) {
    static_assert(DIRECT_STEPS<D_QK> <= Q_REGISTER_STEPS, "Q: more from memory than the registers take");
    if (!item.is_active(params)) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int head = item.first_head + 16 * warp + lane / 4 + 8 * r;
        const u8* row = params.q + item.query * params.q_row_bytes + head * params.q_head_bytes + lane % 4 * 4;
        const bool is_inside = head < params.h_q;
#pragma unroll
        for (int step = 0; step < DIRECT_STEPS<D_QK>; ++step) {
            const u32* columns = reinterpret_cast<const u32*>(row + step * layout::K_STEP_BYTES);
            queries[step][r] = is_inside ? __ldcs(columns) : 0;
            queries[step][r + 2] = is_inside ? __ldcs(columns + 4) : 0;
        }
    }
}

// Load the other k-steps that are kept in registers out of the query stage.
template <int D_QK>
__device__ __forceinline__ void load_queries(u32 (&queries)[Q_REGISTER_STEPS][4], u32 stage, u32 warp, u32 lane) {
    const u32 wide = stage + layout::wide_offset(16 * warp + lane % 16, lane / 16);
#pragma unroll
    for (int step = DIRECT_STEPS<D_QK>; step < Q_REGISTER_STEPS; ++step)
        ptx::ldmatrix_x4(queries[step], (wide ^ (step % 4 * layout::K_STEP_BYTES)) + step / 4 * layout::WIDE_TILE_BYTES);
#pragma unroll
    for (int step = 0; step < Q_REGISTER_STEPS; ++step) hold(queries[step]);
}

// Descriptors of a stage of K or Q.
struct StageDescriptors {
    u64 wide;
    u64 tail;

    template <int D_QK>
    __device__ __forceinline__ u64 step(int step) const {
        using Stage = layout::Stage<D_QK>;
        return step < Stage::WIDE_K_STEPS
                   ? wide + layout::descriptor_step(Stage::wide_step_offset(step))
                   : tail + layout::descriptor_step((step - Stage::WIDE_K_STEPS) * layout::K_STEP_BYTES);
    }
};

// Issue S = Q K^T of a block: 64 heads x 64 tokens. Row r of a thread's fragment is head 16w + l / 4 + 8 r.
template <int D_QK>
__device__ __forceinline__ void start_scores(float (&scores)[32], const u32 (&queries)[Q_REGISTER_STEPS][4],
                                             const StageDescriptors& q, const StageDescriptors& k) {
    ptx::wgmma_fence();
    ptx::wgmma_overwrite(scores, queries[0], k.step<D_QK>(0));
#pragma unroll
    for (int step = 1; step < layout::Stage<D_QK>::K_STEPS; ++step) {
        if (step < Q_REGISTER_STEPS)
            ptx::wgmma_accumulate(scores, queries[step], k.step<D_QK>(step));
        else
            ptx::wgmma_accumulate_shared(scores, q.step<D_QK>(step), k.step<D_QK>(step));
    }
    ptx::wgmma_commit();
}

__device__ __forceinline__ void negate(float (&scores)[32]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) scores[i] = -scores[i];
}

// Set the scores of empty places to -inf.
__device__ __forceinline__ void mask_scores(float (&scores)[32], u64 valid, u32 lane) {
    if (__builtin_expect(valid == ~0ull, 1)) return;
    const u64 mine = valid >> (lane % 4 * 2);
#pragma unroll
    for (int i = 0; i < 32; ++i)
        if (!((mine >> (i / 4 * 8 + i % 2)) & 1)) scores[i] = -infinite();
}

// Largest score of each of the thread's two rows.
__device__ __forceinline__ void row_maxima(const float (&scores)[32], float (&maxima)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float four[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
            four[j] = fmaxf(fmaxf(scores[8 * j + 2 * r], scores[8 * j + 2 * r + 1]),
                            fmaxf(scores[8 * j + 4 + 2 * r], scores[8 * j + 4 + 2 * r + 1]));
        maxima[r] = fmaxf(fmaxf(four[0], four[1]), fmaxf(four[2], four[3]));
    }
}

// The same over the four lanes that share the rows.
__device__ __forceinline__ void share_maxima(float (&maxima)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) maxima[r] = fmaxf(maxima[r], __shfl_xor_sync(~0u, maxima[r], 1));
#pragma unroll
    for (int r = 0; r < 2; ++r) maxima[r] = fmaxf(maxima[r], __shfl_xor_sync(~0u, maxima[r], 2));
}

// The running softmax of a thread's two rows.
struct Rows {
    float reference_log2[2] = {NO_REFERENCE_LOG2, NO_REFERENCE_LOG2};
    float maximum_log2[2] = {-infinite(), -infinite()};
    float sum[2] = {0.0f, 0.0f};  // of this lane's places
};

// Raise the references that fell behind, and publish factors and flags of the pair.
template <int D_QK>
__device__ __forceinline__ void raise_references(SharedPlan<D_QK>& shared, Rows& rows, const float (&maxima_log2)[2],
                                                 u32 slot, u32 warp, u32 lane) {
    u32 raised = 0;
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        rows.maximum_log2[r] = fmaxf(rows.maximum_log2[r], maxima_log2[r]);
        const bool rises = maxima_log2[r] > rows.reference_log2[r] + (HEADROOM_LOG2 + RISE_LOG2);
        const float reference_log2 = rises ? maxima_log2[r] - HEADROOM_LOG2 : rows.reference_log2[r];
        factor[r] = ptx::ex2(rows.reference_log2[r] - reference_log2);
        rows.reference_log2[r] = reference_log2;
        rows.sum[r] *= factor[r];
        if (__any_sync(~0u, rises)) raised |= 1u << r;
    }
    if (lane % 4 == 0) {
        shared.factor[slot][16 * warp + lane / 4] = factor[0];
        shared.factor[slot][16 * warp + lane / 4 + 8] = factor[1];
    }
    if (lane == 0) shared.raised[slot][warp] = static_cast<u8>(raised);
    arrive(shared.factor_full[slot], lane);
}

// Turn scores into P (e4m3) in shared memory and add them up.
__device__ __forceinline__ void write_p(const float (&scores)[32], Rows& rows, float scale_log2, u32 p_low, u32 p_high) {
    u32 packed[8];
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int tokens16 = 0; tokens16 < 4; ++tokens16)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float p[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                p[j] =
                    ptx::ex2(fmaf(scores[8 * tokens16 + j / 2 * 4 + 2 * r + j % 2], scale_log2, -rows.reference_log2[r]));
            sum[r] += (p[0] + p[1]) + (p[2] + p[3]);
            packed[2 * tokens16 + r] = ptx::pack_b16x2(ptx::cvt_e4m3x2(p[0], p[1]), ptx::cvt_e4m3x2(p[2], p[3]));
        }
    ptx::stmatrix_x4(p_low, packed[0], packed[1], packed[2], packed[3]);
    ptx::stmatrix_x4(p_high, packed[4], packed[5], packed[6], packed[7]);
    rows.sum[0] += sum[0];
    rows.sum[1] += sum[1];
}

// Write max_logits and lse of the item, and the scale of its out for the accumulators.
template <int D_QK>
__device__ __forceinline__ void finish_item(const Params& params, SharedPlan<D_QK>& shared, Rows& rows, const Item& item,
                                            u32 slot, u32 warp, u32 lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        rows.sum[r] += __shfl_xor_sync(~0u, rows.sum[r], 1);
        rows.sum[r] += __shfl_xor_sync(~0u, rows.sum[r], 2);
    }
    if (lane % 4 != 0) return;
    const float kv_scale = kv_scale_of(params);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = 16 * warp + lane / 4 + 8 * r;
        const int head = item.first_head + row;
        const float sum = rows.sum[r];
        const bool is_empty = sum == 0.0f, is_nan = sum != sum, is_inside = head < params.h_q;
        float denominator = sum;
        if (params.attn_sink && is_inside)
            denominator += ptx::ex2(__ldg(params.attn_sink + head) * LOG2_E - rows.reference_log2[r]);
        shared.scale[slot][row] = is_empty ? 0.0f : __fdividef(kv_scale, denominator);
        if (is_inside) {
            const i64 at = static_cast<i64>(item.query) * params.h_q + head;
            params.max_logits[at] = is_nan ? sum : rows.maximum_log2[r] * LN_2;
            params.lse[at] = is_empty ? infinite() : (rows.reference_log2[r] + ptx::lg2(sum)) * LN_2;
        }
    }
}

// Score all blocks of the CTA.
template <int D_QK>
__device__ __forceinline__ void scorer(const Params& params, SharedPlan<D_QK>& shared) {
    ptx::setmaxnreg_inc<SCORER_REGISTERS>();
    const u32 thread = threadIdx.x % GROUP_THREADS, lane = thread % WARP_THREADS;
    const u32 warp = __shfl_sync(~0u, thread / WARP_THREADS, 0);
    const float signed_scale = params.sm_scale * q_scale_of(params) * kv_scale_of(params);
    float scale_log2 = fabsf(signed_scale) * LOG2_E;
    if (scale_log2 < SMALLEST_SCALE) scale_log2 = SMALLEST_SCALE;  // -inf times 0 would be NaN
    const u32 p_low = shared_address(shared.p) + layout::narrow_offset(16 * warp + lane % 16, lane / 16);
    const u32 p_high = shared_address(shared.p) + layout::narrow_offset(16 * warp + lane % 16, lane / 16 + 2);

    const u64 first_wide = layout::descriptor(shared_address(shared.keys), layout::SWIZZLE_128_BYTES);
    const u64 first_tail =
        layout::descriptor(shared_address(shared.keys) + layout::Stage<D_QK>::TAIL_OFFSET, layout::SWIZZLE_64_BYTES);
    const StageDescriptors q{
        layout::descriptor(query_stage(shared), layout::SWIZZLE_128_BYTES),
        layout::descriptor(query_stage(shared) + layout::Stage<D_QK>::TAIL_OFFSET, layout::SWIZZLE_64_BYTES)};
    constexpr u64 STAGE_STEP = layout::descriptor_step(SharedPlan<D_QK>::STAGE_BYTES);

    u32 queries[Q_REGISTER_STEPS][4];
    float scores[2][32];
    Ring<SLOTS> ring;
    Ring<STAGES> stage;
    auto pair = PairStages::next(stage);
    u32 turn = 0;
    StageDescriptors k{first_wide, first_tail};
    u32 unreleased = SLOTS;  // slot of the P that waits for the next QK; SLOTS for none
    Item item(params);
    read_queries<D_QK>(queries, params, item, warp, lane);
    for (; item.is_active(params); item.advance(params), ++turn) {
        int pairs_left = item.pairs();
        wait(shared.query_full, turn);
        load_queries<D_QK>(queries, query_stage(shared), warp, lane);

        Rows rows;
        u32 slot;
#pragma unroll 1
        do {
            slot = ring.at;
            const u32 phase = ring.phase;

            // Start QK of both blocks.
            wait(shared.key_full[pair.first.at], pair.first.phase);
            ptx::fence_proxy_async_shared();
            start_scores<D_QK>(scores[0], queries, q, k);
            wait(shared.key_full[pair.second.at], pair.second.phase);
            ptx::fence_proxy_async_shared();
            const u64 valid_first = *reinterpret_cast<const volatile u64*>(shared.valid[pair.first.at]);
            const u64 valid_second = *reinterpret_cast<const volatile u64*>(shared.valid[pair.second.at]);
            const u64 step = STAGE_STEP * static_cast<i64>(pair.distance());
            start_scores<D_QK>(scores[1], queries, q, {k.wide + step, k.tail + step});

            // Prepare the next one.
            ring.advance();
            pair = PairStages::next(stage);
            k.wide = first_wide + STAGE_STEP * pair.first.at;
            k.tail = first_tail + STAGE_STEP * pair.first.at;
            ptx::hold(k.wide);
            ptx::hold(k.tail);

            // Maxima of the first block beside QK of the second. A negative scale flips signs, so that the maximum is one.
            ptx::wgmma_wait<1>();
            hold(scores[0]);
            if (unreleased < SLOTS) arrive(shared.p_full[unreleased], lane);
            if (signed_scale < 0.0f) negate(scores[0]);
            mask_scores(scores[0], valid_first, lane);
            float maxima_log2[2], second[2];
            row_maxima(scores[0], maxima_log2);
            ptx::wgmma_wait<0>();
            hold(scores[1]);
            if (pairs_left == 1) {  // the next item's Q, while the softmax hides the way
                arrive(shared.query_empty, lane);
                Item next = item;
                next.move(params);
                read_queries<D_QK>(queries, params, next, warp, lane);
            }
            if (signed_scale < 0.0f) negate(scores[1]);
            mask_scores(scores[1], valid_second, lane);
            row_maxima(scores[1], second);

            // Softmax.
            maxima_log2[0] = fmaxf(maxima_log2[0], second[0]);
            maxima_log2[1] = fmaxf(maxima_log2[1], second[1]);
            share_maxima(maxima_log2);
            maxima_log2[0] *= scale_log2;
            maxima_log2[1] *= scale_log2;
            wait(shared.p_empty[slot], phase ^ 1);  // PV(m - 2). Seldom waits: K of m needed a stage that pair had left
            raise_references(shared, rows, maxima_log2, slot, warp, lane);
#pragma unroll
            for (int half = 0; half < 2; ++half)
                write_p(scores[half], rows, scale_log2, p_low + (2 * slot + half) * sizeof(shared.p[0][0]),
                        p_high + (2 * slot + half) * sizeof(shared.p[0][0]));
            unreleased = slot;
        } while (--pairs_left != 0);
        finish_item(params, shared, rows, item, slot, warp, lane);
    }
    if (unreleased < SLOTS) {
        ptx::fence_proxy_async_shared();
        arrive(shared.p_full[unreleased], lane);
    }
}

// --------------------------------------------------------------------------------------------------------- accumulator
//
// A warp owns 64 columns of d_v: four 16-column chunks, one for each m-tile (16 of its 64 rows). output[m][4i + j] with
// j = 0, 1 is head 8i + 2c + j, column 16m + 2r; with j = 2, 3 head 8i + 2c + j - 2, column 16m + 2r + 1.

constexpr int M_TILES = D_V / ACCUMULATORS / 64;
constexpr int PV_STEPS = M_TILES * (BLOCK_TOKENS / 32);  // of a block. Step u: m-tile u % 4, tokens 32 (u / 4) and on
constexpr int FRAGMENTS = 2;                             // V^T fragments in flight

__device__ __forceinline__ void hold(float (&output)[M_TILES][32]) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) hold(output[m]);
}

// Multiply the heads of the fragment's column pair i by their factor.
__device__ __forceinline__ void scale_pair(float (&output)[M_TILES][32], int i, float2 factor) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
        output[m][4 * i] *= factor.x;
        output[m][4 * i + 1] *= factor.y;
        output[m][4 * i + 2] *= factor.x;
        output[m][4 * i + 3] *= factor.y;
    }
}

// Rescale the heads whose reference rose with this pair.
template <int D_QK>
__device__ __forceinline__ void rescale(const SharedPlan<D_QK>& shared, float (&output)[M_TILES][32], u32 slot) {
    const u32 raised = *reinterpret_cast<const volatile u32*>(shared.raised[slot]);
    if (raised == 0) return;
    const u32 pair = ptx::tid_x() % 4;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (raised & (1u << (i / 2 * 8 + i % 2)))
            scale_pair(output, i, reinterpret_cast<const float2*>(shared.factor[slot])[4 * i + pair]);
}

// Issue the load of the V^T fragment of PV step u of a pair; `values` is the lane's address of m-tile 0 in the first stage,
// the second one is `step` bytes on.
__device__ __forceinline__ void load_values(u32 (&raw)[4], u32 values, u32 step, int u) {
    ptx::ldmatrix_x4_trans(
        raw, (values ^ (u % M_TILES * 16)) + u % PV_STEPS / M_TILES * 32 * layout::WIDE_COLUMNS + u / PV_STEPS * step);
}

// Separate the two columns of each 16-bit piece.
__device__ __forceinline__ void make_fragment(u32 (&fragment)[4], const u32 (&raw)[4]) {
    fragment[0] = ptx::prmt<0x6420>(raw[0], raw[1]);
    fragment[1] = ptx::prmt<0x7531>(raw[0], raw[1]);
    fragment[2] = ptx::prmt<0x6420>(raw[2], raw[3]);
    fragment[3] = ptx::prmt<0x7531>(raw[2], raw[3]);
    hold(fragment);
}

// Write the item's out, four heads at a time: a warp turns its 64 columns of them over in shared memory, in two buffers by
// turns, so that a store takes 128 bytes of four rows. Chunks of 16 bytes are swizzled by the row: no bank meets twice.
__device__ __forceinline__ void store_output(const Params& params, u8 (&staging)[2][STAGED_HEADS][STAGED_ROW_BYTES],
                                             const float (&output)[M_TILES][32], const Item& item) {
    const u32 lane = ptx::tid_x() % WARP_THREADS, warp = ptx::tid_x() / WARP_THREADS - FIRST_ACCUMULATOR * GROUP_WARPS;
    const int row = lane / 8, chunk = lane % 8;  // of four heads
    const int first_head = item.first_head + 2 * row;
    const int heads = params.h_q - first_head;
    u16* out = params.out + (static_cast<i64>(item.query) * params.h_q + first_head) * D_V + warp * 64 + chunk * 8;
    // Step i: heads 8 (i / 2) + i % 2 + 0, 2, 4, 6.
    const auto stage_heads = [&](int i) {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
            const int to = lane % 4;
            *reinterpret_cast<u32*>(&staging[i % 2][to][((2 * m + lane / 16) ^ (2 * to)) * 16 + lane / 4 % 4 * 4]) =
                ptx::cvt_bf16x2(output[m][i / 2 * 4 + i % 2], output[m][i / 2 * 4 + 2 + i % 2]);
        }
    };
    stage_heads(0);
#pragma unroll
    for (int i = 0; i < HEADS / STAGED_HEADS; ++i) {
        __syncwarp();
        const uint4 columns = *reinterpret_cast<const uint4*>(&staging[i % 2][row][(chunk ^ (2 * row)) * 16]);
        if (i + 1 < HEADS / STAGED_HEADS) stage_heads(i + 1);
        const int head = i / 2 * 8 + i % 2;  // from the first one
        if (head < heads) __stcs(reinterpret_cast<uint4*>(out + head * D_V), columns);
    }
}

// O^T += V^T P^T of a pair. `fragment` holds the first steps' V^T, `raw` the next one's; the second block's stage is `step`
// bytes behind the first one's. Lets each stage go as soon as the last of its V^T is in registers.
__device__ __forceinline__ void multiply_values(float (&output)[M_TILES][32], u32 (&fragment)[FRAGMENTS][4], u32 (&raw)[4],
                                                u32 values, u32 step, u64 p, const u64& first_empty,
                                                const u64& second_empty) {
#pragma unroll
    for (int u = 0; u < 2 * PV_STEPS; ++u) {
        if (u >= FRAGMENTS) {
            ptx::wgmma_wait<FRAGMENTS - 1>();
            hold(fragment[u % FRAGMENTS]);
            make_fragment(fragment[u % FRAGMENTS], raw);
            if (u + 1 < 2 * PV_STEPS) load_values(raw, values, step, u + 1);
        }
        ptx::wgmma_fence();
        ptx::wgmma_accumulate(output[u % M_TILES], fragment[u % FRAGMENTS],
                              p + layout::descriptor_step(u / PV_STEPS * HEADS * BLOCK_TOKENS +
                                                          u % PV_STEPS / M_TILES * layout::K_STEP_BYTES));
        ptx::wgmma_commit();
        if (u % PV_STEPS == PV_STEPS - 1) arrive(u < PV_STEPS ? first_empty : second_empty, ptx::tid_x() % WARP_THREADS);
    }
    ptx::wgmma_wait<0>();
    hold(output);
#pragma unroll
    for (int u = 0; u < FRAGMENTS; ++u) hold(fragment[u]);
}

// Accumulate half of d_v over all blocks of the CTA.
template <int D_QK>
__device__ __forceinline__ void accumulator(const Params& params, SharedPlan<D_QK>& shared) {
    ptx::setmaxnreg_inc<ACCUMULATOR_REGISTERS>();
    const u32 thread = threadIdx.x - FIRST_ACCUMULATOR * GROUP_THREADS, lane = thread % WARP_THREADS;
    const u32 warp = __shfl_sync(~0u, thread / WARP_THREADS, 0);  // of 8: columns 64 warp to 64 warp + 63
    const u32 first_values =
        shared_address(shared.keys) + warp / 2 * layout::WIDE_TILE_BYTES + layout::wide_offset(lane, warp % 2 * 4);

    const u64 first_p = layout::descriptor(shared_address(shared.p), layout::SWIZZLE_64_BYTES);

    float output[M_TILES][32];
    u32 fragment[FRAGMENTS][4], raw[4];
    constexpr int STAGE_BYTES = SharedPlan<D_QK>::STAGE_BYTES;
    Ring<SLOTS> ring;
    Ring<STAGES> stage;
    for (Item item(params); item.is_active(params); item.advance(params)) {
        int pairs_left = item.pairs();
        bool is_first = true;
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 32; ++i) output[m][i] = 0.0f;
        hold(output);
#pragma unroll 1
        for (;;) {
            const auto pair = PairStages::next(stage);
            const u32 slot = ring.at, values = first_values + pair.first.at * STAGE_BYTES;
            const u32 step = pair.distance() * STAGE_BYTES;
            u64 p = first_p + layout::descriptor_step(slot * sizeof(shared.p[0]));
            ptx::hold(p);

            // Load the first fragments and rescale while the scorer makes P.
            wait(shared.factor_full[slot], ring.phase);
#pragma unroll
            for (int u = 0; u < FRAGMENTS; ++u) {
                load_values(raw, values, step, u);
                make_fragment(fragment[u], raw);
            }
            load_values(raw, values, step, FRAGMENTS);
            if (!is_first) rescale(shared, output, slot);
            is_first = false;

            wait(shared.p_full[slot], ring.phase);
            hold(output);
            multiply_values(output, fragment, raw, values, step, p, shared.stage_empty[pair.first.at],
                            shared.stage_empty[pair.second.at]);
            if (--pairs_left == 0) break;
            arrive(shared.p_empty[slot], ptx::tid_x() % WARP_THREADS);
            ring.advance();
        }

        // Divide, let the slot go, write.
        const u32 pair = ptx::tid_x() % 4;
#pragma unroll
        for (int i = 0; i < 8; ++i)
            scale_pair(output, i, reinterpret_cast<const float2*>(shared.scale[ring.at])[4 * i + pair]);
        arrive(shared.p_empty[ring.at], ptx::tid_x() % WARP_THREADS);
        ring.advance();
        store_output(params, shared.staging[ptx::tid_x() / WARP_THREADS - FIRST_ACCUMULATOR * GROUP_WARPS], output, item);
    }
}

// --------------------------------------------------------------------------------------------------------------- entry

template <int D_QK>
__device__ __forceinline__ void set_up_barriers(SharedPlan<D_QK>& shared) {
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(shared_address(&shared.query_full), GROUP_THREADS);
        ptx::mbarrier_init(shared_address(&shared.query_empty), GROUP_ARRIVALS);
        for (int stage = 0; stage < STAGES; ++stage) {
            ptx::mbarrier_init(shared_address(&shared.key_full[stage]), GROUP_THREADS + GROUP_WARPS);
            ptx::mbarrier_init(shared_address(&shared.stage_empty[stage]), ACCUMULATORS * GROUP_ARRIVALS);
        }
        for (int slot = 0; slot < SLOTS; ++slot) {
            ptx::mbarrier_init(shared_address(&shared.factor_full[slot]), GROUP_ARRIVALS);
            ptx::mbarrier_init(shared_address(&shared.p_full[slot]), GROUP_ARRIVALS);
            ptx::mbarrier_init(shared_address(&shared.p_empty[slot]), ACCUMULATORS * GROUP_ARRIVALS);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
}

// One entry; the compiler is told BUFPOOL_D_QK (576 or 512).
extern "C" __global__ void __launch_bounds__(THREADS, 1) sparse_mla_prefill(const __grid_constant__ Params params) {
    extern __shared__ u8 dynamic_shared[];
    auto& shared = *reinterpret_cast<SharedPlan<BUFPOOL_D_QK>*>(dynamic_shared);
    if (shared_address(dynamic_shared) % alignof(SharedPlan<BUFPOOL_D_QK>) != 0) __trap();
    set_up_barriers(shared);
    const u32 group = __shfl_sync(~0u, threadIdx.x / GROUP_THREADS, 0);
    if (group == LOADER) {
        loader(params, shared);
    } else if (group == SCORER) {
        scorer(params, shared);
    } else {
        accumulator(params, shared);
    }
}
