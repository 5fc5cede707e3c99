// The decoder: buffers for one step, and the step itself as a sequence of phases of the team.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "attention.hpp"
#include "model.hpp"
#include "sampler.hpp"
#include "team.hpp"

namespace tf {

// Zeroed memory, aligned to a cache line; pages are taken when they are first written.
template <typename T>
class Buffer {
 public:
  explicit Buffer(size_t count) : memory_(std::calloc(count * sizeof(T) + 64, 1)) {
    if (!memory_) throw std::bad_alloc();
  }
  ~Buffer() { std::free(memory_); }
  Buffer(const Buffer&) = delete;
  T* get() const { return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory_) + 63) & ~uintptr_t(63)); }

 private:
  void* memory_;
};

// Room for quantised activations of `count` rows with k inputs.
class RowBuffer {
 public:
  RowBuffer(int count, int k)
      : q_(size_t(count) * k), scale_(size_t(count) * k / kBlock), sum_(size_t(count) * k / kBlock),
        offset_(size_t(count) * k / kBlock), rows{q_.get(), scale_.get(), sum_.get(), offset_.get(), k} {}

 private:
  Buffer<int8_t> q_;
  Buffer<float> scale_, sum_;
  Buffer<int32_t> offset_;

 public:
  const Rows rows;
};

// What one thread keeps for itself.
struct ThreadScratch {
  static constexpr int kProducts = 20 * kRowBlock;  // rows of 16 channels
  AttentionScratch attention;
  alignas(64) float product[kProducts * kPanel];
  std::vector<float> best_value;  // [max_samples, 16]
  std::vector<int32_t> best_token;
  uint64_t step = 0;              // the step that the best belong to

  // Room for items of `panels` panels in a step of `rows` rows: how many, and where one is; every member finds the same.
  static int places(int rows, int panels) { return kProducts / (panels * std::clamp(rows, 1, kRowBlock)); }
  float* at(int place, int rows, int panels) { return product + place * panels * std::min(rows, kRowBlock) * kPanel; }
};

class Decoder {
 public:
  Decoder(const Model& model, const Limits& limits);
  void step(const Step& step);
  // Choose the tokens of the rows with a mask, which the step before left out: `step` with its masks filled in.
  void choose_masked(const Step& step);

  // Measure the phases of the steps from now on, or no longer; returns what was measured since the last call.
  Team::Profile profile(bool on);

  static size_t cache_bytes(const Model& model, int num_blocks);

 private:
  // Rows first .. first + tokens of one sequence; what they attend to goes to rows `to` on.
  struct TileRef {
    int32_t seq, first, tokens, to;
  };
  // The rows that a part of the step is about, and their residual stream, [rows, hidden].
  struct Part {
    int rows;
    float* hidden;
    const std::vector<TileRef>& tiles;
    int num_tiles;
  };

  void plan_tiles(const Step& step);
  void plan_last_tiles(const Step& step);
  void thread(int id, const Counts& counts, Team::Walk& walk);
  void store_layer(const Layer& layer, const Cache& kv, int num_rows, Team::Walk& walk, ThreadScratch& scratch);
  void attention_layer(const Layer& layer, const Cache& kv, const Part& part, Team::Walk& walk, ThreadScratch& scratch);
  void mlp_layer(const Layer& layer, const Part& part, Team::Walk& walk, ThreadScratch& scratch);
  void append_row(const Layer& layer, const Cache& cache, int row, int kv_head);
  void attend_tile(const Layer& layer, const Cache& cache, const TileRef& ref, int kv_head, AttentionScratch& scratch);
  void project_add(Phase phase, const Linear& w, const Rows& x, const Part& part, const float* post_norm,
                   Team::Walk& walk, ThreadScratch& scratch);
  void finish_residual(float* hidden, int row, const float* post_norm);
  void head(const Counts& counts, Team::Walk& walk, ThreadScratch& scratch);
  void choose(const Step& step);
  void sample_row(int i);
  Cache cache(int layer) const;
  int tokens_of_a_tile() const;
  static int max_items(const Model& model, const Limits& limits);

  const Model model_;
  const Limits limits_;
  const std::vector<Layer> layers_;
  Buffer<uint8_t> cache_;
  Buffer<float> hidden_;   // [max_rows, hidden]: the residual stream
  Buffer<float> last_;     // [max_samples, hidden]: the same in the last layer, of the rows that are sampled
  Buffer<float> branch_;   // [max_rows, hidden]: output of a sub-layer that still has to be normed
  Buffer<float> qkv_;      // [max_rows, (heads + 2 kv_heads) * head_dim]
  RowBuffer input_;        // [max_rows, hidden]: normed residual
  RowBuffer attended_;     // [max_rows, heads * head_dim]
  RowBuffer inner_;        // [max_rows, inner]
  RowBuffer sampled_;      // [max_samples, hidden]
  Buffer<int8_t> query_;   // [max_rows, heads, head_dim]
  Buffer<float> query_scale_;
  Buffer<float> logits_;   // [max_samples, vocab rounded up to 16]: touched only when a row is sampled
  std::vector<int32_t> position_, block_, slot_;  // per row
  std::vector<TileRef> tiles_, last_tiles_;
  Step step_ = {};
  uint64_t num_steps_ = 0;
  bool profiled_ = false;
  Team::Profile profile_;
  std::vector<std::unique_ptr<ThreadScratch>> scratch_;
  Team team_;
};

}  // namespace tf
