// The C functions that Python calls. Nothing throws across; a pointer that is null means memory or threads ran out.
#include <exception>

#include "decoder.hpp"

using namespace tf;

extern "C" {

void* tokenferry_decoder_create(const Model* model, const Limits* limits) {
  try {
    return new Decoder(*model, *limits);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void tokenferry_decoder_destroy(void* decoder) { delete static_cast<Decoder*>(decoder); }

void tokenferry_decoder_step(void* decoder, const Step* step) { static_cast<Decoder*>(decoder)->step(*step); }

void tokenferry_decoder_choose_masked(void* decoder, const Step* step) {
  static_cast<Decoder*>(decoder)->choose_masked(*step);
}

// seconds [phases, 2]: see Decoder::profile; working and waiting.
void tokenferry_decoder_profile(void* decoder, int32_t on, double* seconds) {
  const Team::Profile profile = static_cast<Decoder*>(decoder)->profile(on);
  for (int i = 0; i < kNumPhases; i++) seconds[2 * i] = profile.work[i], seconds[2 * i + 1] = profile.wait[i];
}

// The kernels alone, for the tests that compare each with its reference.

// out [rows, n rounded up to 16] = x [rows, k] quantised, times w.
void tokenferry_linear(const Linear* w, const float* x, int32_t rows, float* out) {
  RowBuffer buffer(rows, w->k);
  for (int r = 0; r < rows; r++)
    for (int b = 0; b < w->blocks(); b++) {
      const float* block = x + size_t(r) * w->k + b * kBlock;
      quantize_block(load(block), load(block + 16), buffer.rows.from(r), b);
    }
  for (int p = 0; p < w->panels(); p++)
    panel_product(*w, p, buffer.rows, 0, rows, out + p * kPanel, size_t(w->panels()) * kPanel);
}

void tokenferry_dequantize(const Linear* w, int32_t channel, float* out) { dequantize_channel(*w, channel, 1.0f, out); }

// out[n] = act(gate) * up, n a multiple of 16.
void tokenferry_gated(const float* gate, const float* up, int32_t n, int32_t activation, float* out) {
  for (int i = 0; i < n; i += 16) store(out + i, gated(load(gate + i), load(up + i), activation));
}

void tokenferry_norm_rotate(float* x, int32_t head_dim, const float* weight, float eps, const float* cos,
                            const float* sin) {
  norm_rotate(x, head_dim, weight, eps, cos, sin);
}

// One K/V head: keys, values [tokens, head_dim] at positions 0 .. tokens, queries [rows, group, head_dim] at the last
// `rows` positions; scale includes log2(e). out [rows, group, head_dim]. rows * group is at most 48.
void tokenferry_attention(const float* queries, const float* keys, const float* values, int32_t tokens, int32_t rows,
                          int32_t group, int32_t head_dim, int32_t window, float scale, float* out) {
  const int blocks = (tokens + kCacheBlock - 1) / kCacheBlock;
  Buffer<uint8_t> memory(blocks * Cache::block_bytes(head_dim));
  const Cache cache{memory.get(), 1, head_dim};
  std::vector<int32_t> table(blocks);
  for (int b = 0; b < blocks; b++) table[b] = blocks - 1 - b;
  for (int t = 0; t < tokens; t++)
    append_token(cache, cache.block(table[t / kCacheBlock], 0), t % kCacheBlock, keys + size_t(t) * head_dim,
                 values + size_t(t) * head_dim);
  auto scratch = std::make_unique<AttentionScratch>();
  const Tile tile{table.data(), tokens - rows, rows, group, window, 0};
  int8_t q[kMaxHeadDim];
  for (int r = 0; r < tile.rows(); r++) {
    float row_scale = quantize_head(queries + size_t(r) * head_dim, head_dim, q);
    scratch->set_query(r, q, row_scale * scale, head_dim);
  }
  attend(cache, tile, *scratch);
  for (int r = 0; r < tile.rows(); r++)
    for (int d = 0; d < head_dim; d++)
      out[size_t(r) * head_dim + d] = scratch->sum[(size_t(d / 16) * tile.rows() + r) * 16 + d % 16] / scratch->total[r];
}

// Of `step` only what the sampling refers to is read.
int32_t tokenferry_sample(float* logits, int32_t vocab, const Sampling* sampling, const Step* step, Logprobs* out) {
  return sample(logits, vocab, *sampling, *step, out);
}

}
