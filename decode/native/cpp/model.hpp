// The plain C structures that cross into Python (decode/native_model.py mirrors them field by field).
#pragma once

#include <cstdint>

#include "linear.hpp"
#include "rows.hpp"

namespace tf {

struct Layer {
  Linear q, k, v, attn_out, gate, up, down;
  const float *attn_norm, *mlp_norm;              // [hidden]
  const float *q_norm, *k_norm;                   // [head_dim] or nullptr
  const float *post_attn_norm, *post_mlp_norm;    // [hidden], both or neither
  const float *cos, *sin;                         // [max_positions, head_dim / 2]
  int32_t window;                                 // 0: none
  int32_t reserved;
};

struct Model {
  int32_t vocab, hidden, inner, num_layers, heads, kv_heads, head_dim, max_positions, activation;
  float eps, attention_scale, embed_scale;
  Linear embed, head;
  const float* final_norm;  // [hidden]
  const Layer* layers;
};

struct Limits {
  int32_t num_blocks, max_rows, max_samples, num_threads;
};

// How one sampled row chooses its token (decode/sampling.py). temperature 0 is greedy.
struct Sampling {
  double uniform;  // in [0, 1)
  float temperature, top_p, min_p;
  int32_t top_k;
  int32_t first_banned, num_banned;      // into Step::banned: tokens that must not be chosen
  int32_t first_adjusted, num_adjusted;  // into Step::adjusted: tokens whose logits are changed first
  int32_t num_logprobs;                  // how many of the likeliest tokens to report; -1: no log probabilities
  int32_t mask;                          // which of Step::masks the token has to be in; -1: none

  // Whether the token is simply the one with the largest logit.
  bool is_plain() const {
    return temperature <= 0.0f && !num_banned && !num_adjusted && num_logprobs < 0 && mask < 0;
  }
};

constexpr int kMaxLogprobs = 20;

// Natural logarithms of probabilities under the unchanged logits.
struct Logprobs {
  float chosen;
  float top[kMaxLogprobs];  // the likeliest first, ties by id
  int32_t top_tokens[kMaxLogprobs];
};

// One step: rows are tokens, sequence by sequence. All arrays belong to the caller.
struct Step {
  int32_t num_seqs, num_rows, num_samples;
  const int32_t* token_ids;          // [num_rows]
  const int32_t* row_starts;         // [num_seqs + 1]
  const int32_t* first_positions;    // [num_seqs]: position of the sequence's first row
  const int32_t* table_starts;       // [num_seqs]: where the sequence's block table begins
  const int32_t* block_tables;
  const int32_t* sample_rows;        // [num_samples], rising
  const Sampling* samplings;         // [num_samples], or nullptr: all greedy
  const int32_t* banned;
  const int32_t* adjusted;           // token ids, of which those outside the vocabulary are passed over
  const float* adjustments;          // what is added to the logit of each of `adjusted`
  const uint32_t* masks;             // [masks, vocab / 32 rounded up]: allowed tokens as bits, the lowest first
  Logprobs* logprobs;                // [num_samples], or nullptr: no row wants any
  int32_t* tokens;                   // [num_samples]: the lowest id among equal logits, -1 if they are not finite
  float* logits;                     // [num_samples, vocab rounded up to 16], or nullptr: not wanted
};

}  // namespace tf
