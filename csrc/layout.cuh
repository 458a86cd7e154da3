// Where each element lives: swizzled tiles in shared memory, their wgmma descriptors, and fragment maps. constexpr only.
//
// A row of K (or Q) is D_QK e4m3 bytes. 64 rows (tokens of a block, or heads of a group) make one stage. That of Q may lack its
// first tiles (sparse_mla_plan.cuh):
//
//     columns   0..127    128..255    256..383    384..511    512..575 (d_qk 576 only)
//     tile      wide 0    wide 1      wide 2      wide 3      tail
//     shape     [64][128 B], 128-byte swizzle                 [64][64 B], 64-byte swizzle
//
// Tiles follow one another, 8192 bytes each, the tail 4096. A swizzle XORs the index of the 16-byte chunk with row bits:
// 128-byte: chunk ^ (row % 8); 64-byte: chunk ^ (row / 2 % 4). One k-step of wgmma (32 columns) is 32 bytes of a row.
//
// Fragments of one warpgroup (warp w, lane l, r = l / 4, c = l % 4):
//   accumulator d[32] of m64n64: d[4i + 0, 1] is row 16w + r,     columns 8i + 2c, + 1
//                                d[4i + 2, 3] is row 16w + r + 8, the same columns
//   operand A in registers, k32: a[0] row r, k 4c..4c+3; a[1] row r + 8, the same k; a[2], a[3] the same rows, k + 16
//
// V^T as operand A out of a K tile: ldmatrix.x4.trans over 32 tokens of one 16-byte chunk gives, in register m, tokens
// 8m + 2c and 8m + 2c + 1 of columns 2r and 2r + 1; prmt 0x6420 and 0x7531 of registers (0, 1) and (2, 3) separate the
// two columns. So fragment row r is column 2r, row r + 8 is column 2r + 1, and k slot 4c + j of each group of 16 tokens
// is token 2c + j % 2 + 8 (j / 2): the order in which a thread holds its own scores, so P needs no exchange.
#pragma once

#include "ptx.cuh"

namespace layout {

constexpr int WIDE_COLUMNS = 128;
constexpr int WIDE_TILE_BYTES = 64 * 128;
constexpr int TAIL_COLUMNS = 64;
constexpr int TAIL_TILE_BYTES = 64 * 64;
constexpr int K_STEP_BYTES = 32;

// Layout type of a shared-memory descriptor, bits 63:62.
constexpr u64 SWIZZLE_128_BYTES = 1;
constexpr u64 SWIZZLE_64_BYTES = 2;

// Byte offset of a 16-byte chunk in a wide tile.
__device__ constexpr u32 wide_offset(u32 row, u32 chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// Byte offset of a 16-byte chunk in a tail tile, and in P ([64 heads][64 tokens]).
__device__ constexpr u32 narrow_offset(u32 row, u32 chunk) { return row * 64 + ((chunk ^ ((row >> 1) & 3)) << 4); }

// Descriptor of a K-major tile [Matrix-descriptor format]: 13:0 address / 16; 29:16 leading offset (ignored when swizzled);
// 45:32 bytes between groups of 8 rows / 16; 63:62 layout type. Tiles start at multiples of 512 bytes or more.
__device__ constexpr u64 descriptor(u32 address, u64 swizzle) {
    const u64 group_bytes = swizzle == SWIZZLE_128_BYTES ? 8 * 128 : 8 * 64;
    return static_cast<u64>((address & 0x3FFFF) >> 4) | (1ull << 16) | ((group_bytes >> 4) << 32) | (swizzle << 62);
}

// How far a descriptor moves for this many bytes. Addresses stay below 2^18, so the low field never carries.
__device__ constexpr u64 descriptor_step(u32 bytes) { return bytes >> 4; }

// A stage of 64 rows of D_QK columns.
template <int D_QK>
struct Stage {
    static constexpr int WIDE_TILES = D_QK / WIDE_COLUMNS;
    static constexpr bool HAS_TAIL = D_QK % WIDE_COLUMNS != 0;
    static constexpr int TAIL_OFFSET = WIDE_TILES * WIDE_TILE_BYTES;
    static constexpr int BYTES = 64 * D_QK;
    static constexpr int WIDE_K_STEPS = WIDE_TILES * (WIDE_COLUMNS / K_STEP_BYTES);
    static constexpr int K_STEPS = D_QK / K_STEP_BYTES;
    static_assert(D_QK % WIDE_COLUMNS == 0 || D_QK % WIDE_COLUMNS == TAIL_COLUMNS, "d_qk: wide tiles and at most one tail");

    // Byte offset of wide k-step `step` from the stage's first byte.
    __device__ static constexpr u32 wide_step_offset(int step) {
        return (step / 4) * WIDE_TILE_BYTES + (step % 4) * K_STEP_BYTES;
    }
};

}  // namespace layout
