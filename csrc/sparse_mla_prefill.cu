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
// in turns t = 0, 1, ... A block is 64 places of an item; n counts the blocks of a CTA over all its items.
//
// | role          | warpgroups | registers | work                                                                       |
// | scorer        | 0, 1       | 88        | every second block: gather K (and Q), S = Q K^T, maximum, P = 2^(s - reference) |
// | accumulator   | 2, 3       | 168       | every block: O^T[256 of d_v, 64 heads] += V^T P^T, V^T fragments from the K tile; epilogue |
//
//   scorer 0      QK(0)...... | softmax(0) .. | QK(2)...... | softmax(2) .. |
//                   gather(2)                   gather(4)
//   scorer 1                  | QK(1)...... | softmax(1) .. | QK(3)...... | softmax(3) ..
//                               gather(3)                     gather(5)
//   accumulators                              | PV(0) ....    | PV(1) ....  | PV(2) ....
//
// One scorer's softmax runs beside the other one's QK and the accumulators' PV, so the tensor cores see work all the time.
//
// Invariants
//   1. The frames of a CTA form one chain: the maximum of block n is merged into the frame of block n - 1, whichever
//      scorer had it, before the frame of n is published. P(n) and the factors of n are in the frame of n.
//   2. A scorer fetches block n + 2 only after PV(n - 2): that frees K stage (n + 2) % 4, P stage n % 2, the factors of n % 2.
//   3. Whoever writes shared memory that wgmma reads fences it (fence.proxy.async) before the barrier.
//   4. An empty place is zero-filled, never multiplied: NaN in rows nobody selects cannot reach a result.
//   5. Which scorer has a block never changes a bit of the result: sums are kept for the even and the odd blocks of an
//      item and added once.
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

// Arrive once for the warp, after all its lanes.
__device__ __forceinline__ void arrive(const u64& barrier) {
    __syncwarp();
    if (ptx::tid_x() % WARP_THREADS == 0) ptx::mbarrier_arrive(shared_address(&barrier));
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

// Where in the CTA's sequence of blocks a warp is.
struct Cursor {
    int turn;
    int item;
    int query;
    int block;
    int length;  // places of the query that may be valid

    __device__ __forceinline__ explicit Cursor(const Params& params) : turn(0), item(blockIdx.x), block(0) { enter(params); }

    // Read what belongs to the item.
    __device__ __forceinline__ void enter(const Params& params) {
        query = static_cast<u32>(item) / static_cast<u32>(params.head_groups);
        length = params.topk;
        if (params.topk_length && is_active(params)) length = min(max(__ldg(params.topk_length + query), 0), params.topk);
    }

    // Go `blocks_ahead` blocks on, into the next items if need be.
    __device__ __forceinline__ void advance(const Params& params, int blocks_ahead) {
        block += blocks_ahead;
        while (block >= blocks() && is_active(params)) {
            block -= blocks();
            ++turn;
            item += gridDim.x;
            enter(params);
        }
    }

    // Blocks of the item; one without places still takes one empty block.
    __device__ __forceinline__ int blocks() const { return max((length + BLOCK_TOKENS - 1) / BLOCK_TOKENS, 1); }
    __device__ __forceinline__ bool is_active(const Params& params) const { return item < params.items; }
    __device__ __forceinline__ bool is_last() const { return block == blocks() - 1; }
    __device__ __forceinline__ int first_head(const Params& params) const { return (item - query * params.head_groups) * HEADS; }
};

// -------------------------------------------------------------------------------------------------------------- gather

// Token numbers of a block, two per lane: places `lane` and `lane + 32`.
struct Tokens {
    int low;
    int high;
};

__device__ __forceinline__ Tokens fetch_tokens(const Params& params, const Cursor& cursor, u32 lane) {
    Tokens tokens{-1, -1};
    if (cursor.is_active(params)) {
        const int place = cursor.block * BLOCK_TOKENS + lane;
        const int* row = params.indices + cursor.query * params.indices_row_elements + place;
        if (place < cursor.length) tokens.low = __ldg(row);
        if (place + WARP_THREADS < cursor.length) tokens.high = __ldg(row + WARP_THREADS);
    }
    return tokens;
}

// One bit for each place of the block that holds a row of kv.
__device__ __forceinline__ u64 valid_places(const Params& params, const Tokens& tokens) {
    const u32 low = __ballot_sync(~0u, static_cast<u32>(tokens.low) < static_cast<u32>(params.s_kv));
    const u32 high = __ballot_sync(~0u, static_cast<u32>(tokens.high) < static_cast<u32>(params.s_kv));
    return low | (static_cast<u64>(high) << 32);
}

// A lane's place in the copies of a stage: wide tiles take 4 rows x 128 B per instruction, the tail 8 rows x 64 B. A warp
// copies rows 16w to 16w + 15.
struct CopyLane {
    u32 wide_row;       // of 4
    u32 wide_column;    // bytes
    u32 wide_offset;    // in the stage, of row 16w + wide_row; odd groups of 4 rows have chunk bit 2 flipped
    u32 tail_row;       // of 8
    u32 tail_column;    // bytes, from the tail's first
    u32 tail_offset;    // in the tail tile

    __device__ __forceinline__ CopyLane(u32 warp, u32 lane)
        : wide_row(lane / 8),
          wide_column(lane % 8 * 16),
          wide_offset(layout::wide_offset(16 * warp + lane / 8, lane % 8)),
          tail_row(lane / 4),
          tail_column(lane % 4 * 16),
          tail_offset(layout::narrow_offset(16 * warp + lane / 4, lane % 4)) {}
};
constexpr u32 ODD_ROWS_FLIP = 4 * 16;

// Copy the selected rows of kv into a key stage. `destination` is the stage's address plus lane.wide_offset, in a register
// of its own (see ptx::cp_async_16).
template <int D_QK>
__device__ __forceinline__ void gather_keys(const Params& params, const Tokens& tokens, u32 warp, const CopyLane& lane,
                                            u32 destination, u64 policy) {
    using Stage = layout::Stage<D_QK>;
    const int token = warp < 2 ? tokens.low : tokens.high;
    const int mine = static_cast<u32>(token) < static_cast<u32>(params.s_kv) ? token : -1;
    const u32 first = (warp & 1) * 16;
    const u32 flip = (destination ^ ODD_ROWS_FLIP) - destination;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = __shfl_sync(~0u, mine, first + 4 * i + lane.wide_row);
        const u32 bytes = row >= 0 ? 16 : 0;
        const u8* source = params.kv + max(row, 0) * params.kv_row_bytes + lane.wide_column;
        const u32 to = destination + (i & 1 ? flip : 0) + i * 4 * layout::WIDE_COLUMNS;
#pragma unroll
        for (int tile = 0; tile < Stage::WIDE_TILES; ++tile)
            ptx::cp_async_16(to + tile * layout::WIDE_TILE_BYTES, source + tile * layout::WIDE_COLUMNS, bytes, policy);
    }
    if constexpr (Stage::HAS_TAIL) {
        const u32 to = destination + (Stage::TAIL_OFFSET + lane.tail_offset - lane.wide_offset);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = __shfl_sync(~0u, mine, first + 8 * i + lane.tail_row);
            const u8* source = params.kv + max(row, 0) * params.kv_row_bytes + (D_QK - layout::TAIL_COLUMNS) + lane.tail_column;
            ptx::cp_async_16(to + i * 8 * layout::TAIL_COLUMNS, source, row >= 0 ? 16 : 0, policy);
        }
    }
}

// Copy the item's 64 heads of q into a query stage; heads beyond h_q become zeros.
template <int D_QK>
__device__ __forceinline__ void fetch_queries(const Params& params, const Cursor& cursor, u32 warp, const CopyLane& lane,
                                              u32 stage) {
    using Stage = layout::Stage<D_QK>;
    const int first_head = cursor.first_head(params);
    const u8* query = params.q + cursor.query * params.q_row_bytes;
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
        const int row = 16 * warp + 4 * i + lane.wide_row;
        const int head = first_head + row;
        const u8* source = query + min(head, params.h_q - 1) * params.q_head_bytes + lane.wide_column;
        const u32 to = stage + ((lane.wide_offset + i * 4 * layout::WIDE_COLUMNS) ^ (i & 1 ? ODD_ROWS_FLIP : 0));
#pragma unroll
        for (int tile = 0; tile < Stage::WIDE_TILES; ++tile)
            ptx::cp_async_16(to + tile * layout::WIDE_TILE_BYTES, source + tile * layout::WIDE_COLUMNS,
                             head < params.h_q ? 16 : 0);
    }
    if constexpr (Stage::HAS_TAIL) {
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
            const int head = first_head + 16 * warp + 8 * i + lane.tail_row;
            const u8* source = query + min(head, params.h_q - 1) * params.q_head_bytes + (D_QK - layout::TAIL_COLUMNS) +
                               lane.tail_column;
            ptx::cp_async_16(stage + Stage::TAIL_OFFSET + lane.tail_offset + i * 8 * layout::TAIL_COLUMNS, source,
                             head < params.h_q ? 16 : 0);
        }
    }
}

// -------------------------------------------------------------------------------------------------------------- scorer

// Issue S = Q K^T: 64 heads x 64 tokens; row r of a thread's fragment is head 16w + l / 4 + 8 r.
template <int D_QK>
__device__ __forceinline__ void start_scores(float (&scores)[32], u32 query_stage, u32 key_stage) {
    using Stage = layout::Stage<D_QK>;
    const u64 q_wide = layout::descriptor(query_stage, layout::SWIZZLE_128_BYTES);
    const u64 k_wide = layout::descriptor(key_stage, layout::SWIZZLE_128_BYTES);
    ptx::wgmma_fence();
    ptx::wgmma_ss_overwrite(scores, q_wide, k_wide);
#pragma unroll
    for (int step = 1; step < Stage::WIDE_K_STEPS; ++step) {
        const u64 moved = layout::descriptor_step(Stage::wide_step_offset(step));
        ptx::wgmma_ss_accumulate(scores, q_wide + moved, k_wide + moved);
    }
    if constexpr (Stage::HAS_TAIL) {
        const u64 q_tail = layout::descriptor(query_stage + Stage::TAIL_OFFSET, layout::SWIZZLE_64_BYTES);
        const u64 k_tail = layout::descriptor(key_stage + Stage::TAIL_OFFSET, layout::SWIZZLE_64_BYTES);
#pragma unroll
        for (int step = 0; step < Stage::K_STEPS - Stage::WIDE_K_STEPS; ++step) {
            const u64 moved = layout::descriptor_step(step * layout::K_STEP_BYTES);
            ptx::wgmma_ss_accumulate(scores, q_tail + moved, k_tail + moved);
        }
    }
    ptx::wgmma_commit();
}

// Set the scores of empty places to -inf.
__device__ __forceinline__ void mask_scores(float (&scores)[32], u64 valid, u32 lane) {
    if (__builtin_expect(valid == ~0ull, 1)) return;
    const u64 mine = valid >> (lane % 4 * 2);
#pragma unroll
    for (int i = 0; i < 32; ++i)
        if (!((mine >> (i / 4 * 8 + i % 2)) & 1)) scores[i] = -infinite();
}

// Largest score of each of the thread's two rows, over the four lanes that share them.
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
#pragma unroll
    for (int r = 0; r < 2; ++r) maxima[r] = fmaxf(maxima[r], __shfl_xor_sync(~0u, maxima[r], 1));
#pragma unroll
    for (int r = 0; r < 2; ++r) maxima[r] = fmaxf(maxima[r], __shfl_xor_sync(~0u, maxima[r], 2));
}

// A thread's two rows, of the running softmax as one scorer knows it.
struct Rows {
    float reference_log2[2];
    float maximum_log2[2];
    float sum[2];  // of this lane's places in this scorer's blocks, in the frame of `reference_log2`
};

// Merge the maxima of block n into the frame of block n - 1 and write frame, factors and flags of block n.
template <int D_QK>
__device__ __forceinline__ void advance_frame(SharedPlan<D_QK>& shared, Rows& rows, const float (&maxima_log2)[2], u32 n,
                                              const Cursor& here, u32 warp, u32 lane, bool takes_partial_sum) {
    const u32 row = 16 * warp + lane / 4;
    const u32 mine = n % SCORERS, other = mine ^ 1;
    u32 raised = 0;
    if (n > 0) wait(shared.frame_full[other], (n - 1) / SCORERS);
    if (takes_partial_sum) wait(shared.p_full[other], (n - 1) / SCORERS);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        Frame frame{NO_REFERENCE_LOG2, -infinite()};
        if (here.block > 0) frame = shared.frame[other][row + 8 * r];
        const bool rises = maxima_log2[r] > frame.reference_log2 + (HEADROOM_LOG2 + RISE_LOG2);
        const float reference_log2 = rises ? maxima_log2[r] - HEADROOM_LOG2 : frame.reference_log2;
        const float factor = ptx::ex2(frame.reference_log2 - reference_log2);
        rows.sum[r] = here.block < SCORERS ? 0.0f : rows.sum[r] * ptx::ex2(rows.reference_log2[r] - reference_log2);
        if (takes_partial_sum && lane % 4 == 0) rows.sum[r] += shared.partial_sum[row + 8 * r] * factor;
        rows.reference_log2[r] = reference_log2;
        rows.maximum_log2[r] = fmaxf(frame.maximum_log2, maxima_log2[r]);
        if (lane % 4 == 0) {
            shared.frame[mine][row + 8 * r] = {reference_log2, rows.maximum_log2[r]};
            shared.factor[mine][row + 8 * r] = factor;
        }
        if (__any_sync(~0u, rises)) raised |= 1u << r;
    }
    if (lane == 0) shared.raised[mine][warp] = raised;
    arrive(shared.frame_full[mine]);
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
                p[j] = ptx::ex2(fmaf(scores[8 * tokens16 + j / 2 * 4 + 2 * r + j % 2], scale_log2, -rows.reference_log2[r]));
            sum[r] += (p[0] + p[1]) + (p[2] + p[3]);
            packed[2 * tokens16 + r] = ptx::pack_b16x2(ptx::cvt_e4m3x2(p[0], p[1]), ptx::cvt_e4m3x2(p[2], p[3]));
        }
    ptx::stmatrix_x4(p_low, packed[0], packed[1], packed[2], packed[3]);
    ptx::stmatrix_x4(p_high, packed[4], packed[5], packed[6], packed[7]);
    rows.sum[0] += sum[0];
    rows.sum[1] += sum[1];
}

__device__ __forceinline__ void sum_over_row(float (&sum)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
        sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    }
}

// Hand this scorer's sums to the one that ends the item.
template <int D_QK>
__device__ __forceinline__ void publish_partial_sum(SharedPlan<D_QK>& shared, Rows& rows, u32 warp, u32 lane) {
    sum_over_row(rows.sum);
    if (lane % 4 == 0) {
        shared.partial_sum[16 * warp + lane / 4] = rows.sum[0];
        shared.partial_sum[16 * warp + lane / 4 + 8] = rows.sum[1];
    }
}

// Write max_logits and lse of the item, and the scale of its out for the accumulators.
template <int D_QK>
__device__ __forceinline__ void finish_item(const Params& params, SharedPlan<D_QK>& shared, Rows& rows, const Cursor& here,
                                            u32 warp, u32 lane) {
    sum_over_row(rows.sum);
    if (lane % 4 == 0) {
        const float kv_scale = kv_scale_of(params);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = 16 * warp + lane / 4 + 8 * r;
            const int head = here.first_head(params) + row;
            const float sum = rows.sum[r];
            const bool is_empty = sum == 0.0f;
            const bool is_inside = head < params.h_q;
            float denominator = sum;
            if (params.attn_sink && is_inside)
                denominator += ptx::ex2(__ldg(params.attn_sink + head) * LOG2_E - rows.reference_log2[r]);
            shared.scale[here.turn % SCALE_STAGES][row] = is_empty ? 0.0f : __fdividef(kv_scale, denominator);
            if (is_inside) {
                const i64 at = static_cast<i64>(here.query) * params.h_q + head;
                const bool is_nan = sum != sum;
                params.max_logits[at] = is_nan ? sum : rows.maximum_log2[r] * LN_2;
                params.lse[at] = is_empty ? infinite() : (rows.reference_log2[r] + ptx::lg2(sum)) * LN_2;
            }
        }
    }
    arrive(shared.scale_full[here.turn % SCALE_STAGES]);
}

// Score every second block of the CTA, from its `parity`-th on.
template <int D_QK>
__device__ __forceinline__ void scorer(const Params& params, SharedPlan<D_QK>& shared, u32 parity) {
    ptx::setmaxnreg_dec<SCORER_REGISTERS>();
    const u32 thread = threadIdx.x % GROUP_THREADS;
    const u32 lane = thread % WARP_THREADS, warp = __shfl_sync(~0u, thread / WARP_THREADS, 0);
    const CopyLane copy(warp, lane);
    const u64 policy = ptx::createpolicy_evict_last();
    const float signed_scale = params.sm_scale * q_scale_of(params) * kv_scale_of(params);
    const bool is_negative = signed_scale < 0.0f;
    float scale_log2 = fabsf(signed_scale) * LOG2_E;
    if (scale_log2 < SMALLEST_SCALE) scale_log2 = SMALLEST_SCALE;  // -inf times 0 would be NaN
    const u32 p_row = 16 * warp + lane % 16, p_chunk = lane / 16;
    const u32 p_low = shared_address(shared.p[parity]) + layout::narrow_offset(p_row, p_chunk);
    const u32 p_high = shared_address(shared.p[parity]) + layout::narrow_offset(p_row, p_chunk + 2);

    Cursor here(params);
    here.advance(params, parity);
    if (!here.is_active(params)) return;

    // Fetch the first block.
    // The shuffle makes the address opaque: ptxas must not split it into a per-thread and a uniform part (ptx::cp_async_16).
    u32 destination = __shfl_sync(~0u, shared_address(shared.keys[parity]) + copy.wide_offset, lane);
    int to_other_stage = SCORERS * SharedPlan<D_QK>::STAGE_BYTES;
    Tokens tokens = fetch_tokens(params, here, lane);
    u64 valid_next = valid_places(params, tokens);
    gather_keys<D_QK>(params, tokens, warp, copy, destination, policy);
    if (here.block == 0) fetch_queries<D_QK>(params, here, warp, copy, shared_address(shared.queries[here.turn % QUERY_STAGES]));
    Cursor next = here;
    next.advance(params, SCORERS);
    tokens = fetch_tokens(params, next, lane);

    Rows rows;
    for (u32 n = parity; here.is_active(params); n += SCORERS) {
        const u64 valid = valid_next;
        const u32 query_stage = here.turn % QUERY_STAGES, query_phase = here.turn / QUERY_STAGES;

        // Wait for this block's rows.
        ptx::cp_async_wait_all();
        ptx::fence_proxy_async_shared();
        ptx::bar_sync(1 + parity, GROUP_THREADS);
        if (here.block == 0) arrive(shared.query_full[query_stage]);
        if (here.block < SCORERS) wait(shared.query_full[query_stage], query_phase);

        // Start QK, and fetch this scorer's next block in its shadow.
        float scores[32];
        start_scores<D_QK>(scores, shared_address(shared.queries[query_stage]), shared_address(shared.keys[n % KEY_STAGES]));
        wait(shared.key_empty[(n + SCORERS) % KEY_STAGES], (n + SCORERS) / KEY_STAGES + 1);
        destination += to_other_stage;
        to_other_stage = -to_other_stage;
        Cursor after = next;
        if (next.is_active(params)) {
            valid_next = valid_places(params, tokens);
            gather_keys<D_QK>(params, tokens, warp, copy, destination, policy);
            after.advance(params, SCORERS);
            tokens = fetch_tokens(params, after, lane);
        }
        ptx::wgmma_wait<0>();
        hold(scores);

        // Mask, find the maxima, publish the frame.
        if (is_negative) {
#pragma unroll
            for (int i = 0; i < 32; ++i) scores[i] = -scores[i];
        }
        mask_scores(scores, valid, lane);
        float maxima_log2[2];
        row_maxima(scores, maxima_log2);
        maxima_log2[0] *= scale_log2;
        maxima_log2[1] *= scale_log2;
        const bool is_last = here.is_last();
        advance_frame(shared, rows, maxima_log2, n, here, warp, lane, is_last && here.block > 0);
        if (is_last) arrive(shared.query_empty[query_stage]);

        // Fetch the queries of the next item.
        if (next.is_active(params) && next.block == 0) {
            const u32 stage = next.turn % QUERY_STAGES;
            wait(shared.query_empty[stage], next.turn / QUERY_STAGES + 1);
            fetch_queries<D_QK>(params, next, warp, copy, shared_address(shared.queries[stage]));
        }

        // Write P and hand it over.
        write_p(scores, rows, scale_log2, p_low, p_high);
        if (here.block == here.blocks() - 2) publish_partial_sum(shared, rows, warp, lane);
        ptx::fence_proxy_async_shared();
        arrive(shared.p_full[parity]);
        if (is_last) finish_item(params, shared, rows, here, warp, lane);
        here = next;
        next = after;
    }
}

// --------------------------------------------------------------------------------------------------------- accumulator
//
// A warp owns 64 columns of d_v: four 16-column chunks, one for each m-tile (16 of its 64 rows). output[m][4i + j] with
// j = 0, 1 is head 8i + 2c + j, column 16m + 2r; with j = 2, 3 head 8i + 2c + j - 2, column 16m + 2r + 1.

constexpr int M_TILES = D_V / ACCUMULATORS / 64;
constexpr int PV_STEPS = M_TILES * (BLOCK_TOKENS / 32);  // step u: m-tile u % 4, tokens 32 (u / 4) and on
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

// Rescale the heads whose reference rose with this block.
template <int D_QK>
__device__ __forceinline__ void rescale(const SharedPlan<D_QK>& shared, float (&output)[M_TILES][32], u32 stage) {
    const u32 raised = *reinterpret_cast<const volatile u32*>(shared.raised[stage]);
    if (raised == 0) return;
    const u32 pair = ptx::tid_x() % 4;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (raised & (1u << (i / 2 * 8 + i % 2)))
            scale_pair(output, i, reinterpret_cast<const float2*>(shared.factor[stage])[4 * i + pair]);
}

// Issue the load of the V^T fragment of PV step u; `values` is the lane's address of m-tile 0 in the key stage.
__device__ __forceinline__ void load_values(u32 (&raw)[4], u32 values, int u) {
    ptx::ldmatrix_x4_trans(raw, (values + u / M_TILES * 32 * layout::WIDE_COLUMNS) ^ (u % M_TILES * 16));
}

// Separate the two columns of each 16-bit piece.
__device__ __forceinline__ void make_fragment(u32 (&fragment)[4], const u32 (&raw)[4]) {
    fragment[0] = ptx::prmt<0x6420>(raw[0], raw[1]);
    fragment[1] = ptx::prmt<0x7531>(raw[0], raw[1]);
    fragment[2] = ptx::prmt<0x6420>(raw[2], raw[3]);
    fragment[3] = ptx::prmt<0x7531>(raw[2], raw[3]);
    hold(fragment);
}

// Write the item's out: 4 bytes (columns 2r, 2r + 1) of a head's row per store, 32 bytes of four rows per warp.
__device__ __forceinline__ void store_output(const Params& params, float (&output)[M_TILES][32], const float* scale,
                                             const Cursor& here) {
    const u32 thread = ptx::tid_x() - SCORERS * GROUP_THREADS;
    const u32 warp = thread / WARP_THREADS, pair = thread % 4, column = warp * 64 + thread % WARP_THREADS / 4 * 2;
    const int first_head = here.first_head(params);
    const int heads = params.h_q - first_head - 2 * static_cast<int>(pair);
    u16* out = params.out + (static_cast<i64>(here.query) * params.h_q + first_head + 2 * pair) * D_V + column;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        scale_pair(output, i, reinterpret_cast<const float2*>(scale)[4 * i + pair]);
#pragma unroll
        for (int j = 0; j < 2; ++j)
            if (8 * i + j < heads) {
#pragma unroll
                for (int m = 0; m < M_TILES; ++m)
                    __stcs(reinterpret_cast<u32*>(out + (8 * i + j) * D_V + 16 * m),
                           ptx::cvt_bf16x2(output[m][4 * i + j], output[m][4 * i + 2 + j]));
            }
    }
}

// Accumulate half of d_v over all blocks of the CTA.
template <int D_QK>
__device__ __forceinline__ void accumulator(const Params& params, SharedPlan<D_QK>& shared) {
    ptx::setmaxnreg_inc<ACCUMULATOR_REGISTERS>();
    const u32 thread = threadIdx.x - SCORERS * GROUP_THREADS, lane = thread % WARP_THREADS;
    const u32 warp = __shfl_sync(~0u, thread / WARP_THREADS, 0);  // of 8: columns 64 warp to 64 warp + 63
    const u32 values = shared_address(shared.keys) + warp / 2 * layout::WIDE_TILE_BYTES + layout::wide_offset(lane, warp % 2 * 4);

    float output[M_TILES][32];
    u32 fragment[FRAGMENTS][4], raw[4];
    u32 n = 0;
    for (Cursor here(params); here.is_active(params); here.advance(params, 1)) {
        const int blocks = here.blocks();
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 32; ++i) output[m][i] = 0.0f;
        hold(output);
        for (int block = 0; block < blocks; ++block, ++n) {
            const u32 stage = n % SCORERS, stage_values = values + n % KEY_STAGES * SharedPlan<D_QK>::STAGE_BYTES;

            // Load the first fragments and rescale while the scorer makes P.
            wait(shared.frame_full[stage], n / SCORERS);
#pragma unroll
            for (int u = 0; u < FRAGMENTS; ++u) {
                load_values(raw, stage_values, u);
                make_fragment(fragment[u], raw);
            }
            load_values(raw, stage_values, FRAGMENTS);
            if (block > 0) rescale(shared, output, stage);

            // Multiply: O^T += V^T P^T.
            wait(shared.p_full[stage], n / SCORERS);
            hold(output);
            const u64 p = layout::descriptor(shared_address(shared.p[stage]), layout::SWIZZLE_64_BYTES);
#pragma unroll
            for (int u = 0; u < PV_STEPS; ++u) {
                if (u >= FRAGMENTS) {
                    ptx::wgmma_wait<FRAGMENTS - 1>();
                    hold(fragment[u % FRAGMENTS]);
                    make_fragment(fragment[u % FRAGMENTS], raw);
                    if (u + 1 < PV_STEPS) load_values(raw, stage_values, u + 1);
                }
                ptx::wgmma_fence();
                ptx::wgmma_rs_accumulate(output[u % M_TILES], fragment[u % FRAGMENTS],
                                         p + layout::descriptor_step(u / M_TILES * layout::K_STEP_BYTES));
                ptx::wgmma_commit();
            }
            ptx::wgmma_wait<0>();
            hold(output);
#pragma unroll
            for (int u = 0; u < FRAGMENTS; ++u) hold(fragment[u]);
            arrive(shared.key_empty[n % KEY_STAGES]);
        }
        here.block = blocks - 1;
        wait(shared.scale_full[here.turn % SCALE_STAGES], here.turn / SCALE_STAGES);
        store_output(params, output, shared.scale[here.turn % SCALE_STAGES], here);
    }
}

// --------------------------------------------------------------------------------------------------------------- entry

template <int D_QK>
__device__ __forceinline__ void set_up_barriers(SharedPlan<D_QK>& shared) {
    if (threadIdx.x == 0) {
        const auto init = [](u64* barriers, int count, u32 arrivals) {
            for (int i = 0; i < count; ++i) ptx::mbarrier_init(shared_address(barriers + i), arrivals);
        };
        init(shared.query_full, QUERY_STAGES, GROUP_WARPS);
        init(shared.query_empty, QUERY_STAGES, GROUP_WARPS);
        init(shared.frame_full, SCORERS, GROUP_WARPS);
        init(shared.p_full, SCORERS, GROUP_WARPS);
        init(shared.key_empty, KEY_STAGES, ACCUMULATORS * GROUP_WARPS);
        init(shared.scale_full, SCALE_STAGES, GROUP_WARPS);
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
    if (group < SCORERS) {
        scorer(params, shared, group);
    } else {
        accumulator(params, shared);
    }
}
