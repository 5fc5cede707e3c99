#include "decoder.hpp"

#include <cmath>
#include <utility>

namespace tf {

size_t Decoder::cache_bytes(const Model& m, int num_blocks) {
  return size_t(m.num_layers) * num_blocks * m.kv_heads * Cache::block_bytes(m.head_dim);
}

Decoder::Decoder(const Model& m, const Limits& l)
    : model_(m),
      limits_(l),
      layers_(m.layers, m.layers + m.num_layers),
      cache_(cache_bytes(m, l.num_blocks)),
      hidden_(size_t(l.max_rows) * m.hidden),
      last_(size_t(l.max_samples) * m.hidden),
      branch_(size_t(l.max_rows) * m.hidden),
      qkv_(size_t(l.max_rows) * (m.heads + 2 * m.kv_heads) * m.head_dim),
      input_(l.max_rows, m.hidden),
      attended_(l.max_rows, m.heads * m.head_dim),
      inner_(l.max_rows, m.inner),
      sampled_(l.max_samples, m.hidden),
      query_(size_t(l.max_rows) * m.heads * m.head_dim),
      query_scale_(size_t(l.max_rows) * m.heads),
      logits_(size_t(l.max_samples) * m.head.panels() * kPanel),
      position_(l.max_rows),
      block_(l.max_rows),
      slot_(l.max_rows),
      team_(l.num_threads, max_items(m, l), [this](int id, const Counts& counts, Team::Walk& walk) { thread(id, counts, walk); }) {
  for (int id = 0; id < team_.size(); id++) {
    scratch_.push_back(std::make_unique<ThreadScratch>());
    scratch_.back()->best_value.resize(size_t(l.max_samples) * kPanel);
    scratch_.back()->best_token.resize(size_t(l.max_samples) * kPanel);
  }
}

int Decoder::tokens_of_a_tile() const { return std::max(1, kTileRows / (model_.heads / model_.kv_heads)); }

// The longest loop that publishes.
int Decoder::max_items(const Model& m, const Limits& l) {
  const int panels = std::max({(m.heads + 2 * m.kv_heads) * m.head_dim, m.hidden, m.inner}) / kPanel + 3;
  return panels * ((l.max_rows + kRowBlock - 1) / kRowBlock);
}

Cache Decoder::cache(int layer) const {
  return Cache{cache_.get() + layer * (cache_bytes(model_, limits_.num_blocks) / model_.num_layers), model_.kv_heads,
               model_.head_dim};
}

void Decoder::plan_tiles(const Step& step) {
  const int most = tokens_of_a_tile();
  tiles_.clear();
  for (int seq = 0; seq < step.num_seqs; seq++) {
    const int begin = step.row_starts[seq], end = step.row_starts[seq + 1];
    const int32_t* table = step.block_tables + step.table_starts[seq];
    for (int row = begin; row < end; row++) {
      position_[row] = step.first_positions[seq] + row - begin;
      block_[row] = table[position_[row] / kCacheBlock];
      slot_[row] = position_[row] % kCacheBlock;
    }
    for (int row = begin; row < end; row += most) tiles_.push_back({seq, row, std::min(most, end - row), row});
  }
}

// Of the rows that are sampled, which the last layer puts side by side.
void Decoder::plan_last_tiles(const Step& step) {
  const int most = tokens_of_a_tile();
  last_tiles_.clear();
  for (int i = 0, seq = 0; i < step.num_samples; i++) {
    const int row = step.sample_rows[i];
    while (row >= step.row_starts[seq + 1]) seq++;
    TileRef* before = last_tiles_.empty() ? nullptr : &last_tiles_.back();
    if (before && before->seq == seq && before->first + before->tokens == row && before->tokens < most)
      before->tokens++;
    else
      last_tiles_.push_back({seq, row, 1, i});
  }
}

void Decoder::step(const Step& step) {
  step_ = step;
  if (!step_.logits && step_.samplings) step_.logits = logits_.get();
  num_steps_++;
  plan_tiles(step);
  plan_last_tiles(step);
  team_.run({step.num_rows, int(tiles_.size()), int(last_tiles_.size()), step.num_samples,
             step.samplings ? step.num_samples : 0},
            profiled_ ? &profile_ : nullptr);
  choose(step);
}

Team::Profile Decoder::profile(bool on) {
  profiled_ = on;
  return std::exchange(profile_, {});
}

void Decoder::thread(int id, const Counts& counts, Team::Walk& walk) {
  ThreadScratch& scratch = *scratch_[id];
  walk.loop(kEmbed, counts.rows, [&](int row) {
    float* out = hidden_.get() + size_t(row) * model_.hidden;
    dequantize_channel(model_.embed, step_.token_ids[row], model_.embed_scale, out);
  });
  const Part all{counts.rows, hidden_.get(), tiles_, counts.tiles};
  const Part last{counts.samples, last_.get(), last_tiles_, counts.last_tiles};
  for (int index = 0; index < model_.num_layers; index++) {
    const Layer& layer = layers_[index];
    const float* pending = index ? layers_[index - 1].post_mlp_norm : nullptr;
    walk.loop(kNorm, all.rows, [&](int row) {
      finish_residual(all.hidden, row, pending);
      norm_quantize(all.hidden + size_t(row) * model_.hidden, layer.attn_norm, model_.eps, input_.rows.from(row));
    });
    store_layer(layer, cache(index), all.rows, walk, scratch);
    const bool is_last = index == model_.num_layers - 1;
    if (is_last)  // PERF: the others are not needed any more, 3 % of a prefill
      walk.loop(kNorm, last.rows, [&](int i) {
        std::copy_n(all.hidden + size_t(step_.sample_rows[i]) * model_.hidden, model_.hidden,
                    last.hidden + size_t(i) * model_.hidden);
      });
    attention_layer(layer, cache(index), is_last ? last : all, walk, scratch);
    mlp_layer(layer, is_last ? last : all, walk, scratch);
  }
  walk.loop(kNorm, last.rows, [&](int i) {
    finish_residual(last.hidden, i, layers_.back().post_mlp_norm);
    norm_quantize(last.hidden + size_t(i) * model_.hidden, model_.final_norm, model_.eps, sampled_.rows.from(i));
  });
  head(counts, walk, scratch);
  walk.loop(kSample, counts.draws, [&](int i) {
    if (!step_.samplings[i].is_plain() && step_.samplings[i].mask < 0) sample_row(i);
  });
}

void Decoder::choose_masked(const Step& step) {
  step_.masks = step.masks;
  for (int i = 0; i < step.num_samples; i++)
    if (step.samplings[i].mask >= 0) sample_row(i);
}

void Decoder::sample_row(int i) {
  float* logits = step_.logits + size_t(i) * model_.head.panels() * kPanel;
  step_.tokens[i] = sample(logits, model_.vocab, step_.samplings[i], step_, step_.logprobs ? step_.logprobs + i : nullptr);
}

// Queries of the rows; their keys and values into the cache.
void Decoder::store_layer(const Layer& layer, const Cache& kv, int num_rows, Team::Walk& walk, ThreadScratch& scratch) {
  const int q_columns = model_.heads * model_.head_dim, kv_columns = model_.kv_heads * model_.head_dim;
  const size_t stride = q_columns + 2 * kv_columns;
  const int q_panels = layer.q.panels(), kv_panels = layer.k.panels();
  const int panels = q_panels + 2 * kv_panels, row_blocks = (num_rows + kRowBlock - 1) / kRowBlock;
  const int places = scratch.places(num_rows, 1);
  auto compute = [&](int item, int place) {
    const int panel = item % panels, first = item / panels * kRowBlock;
    const int count = std::min(kRowBlock, num_rows - first);
    const bool is_q = panel < q_panels, is_k = !is_q && panel < q_panels + kv_panels;
    const Linear& w = is_q ? layer.q : is_k ? layer.k : layer.v;
    panel_product(w, is_q ? panel : (panel - q_panels) % kv_panels, input_.rows, first, count,
                  scratch.at(place, num_rows, 1), kPanel);
  };
  auto publish = [&](int item, int place) {  // the three outputs lie side by side
    const int panel = item % panels, first = item / panels * kRowBlock;
    const int count = std::min(kRowBlock, num_rows - first);
    const float* product = scratch.at(place, num_rows, 1);
    for (int r = 0; r < count; r++)
      store(qkv_.get() + (first + r) * stride + panel * kPanel, load(product + r * kPanel));
  };
  walk.loop(kQkv, panels * row_blocks, places, compute, publish);
  walk.loop(kAppend, num_rows * model_.kv_heads, [&](int item) {
    append_row(layer, kv, item / model_.kv_heads, item % model_.kv_heads);
  });
}

void Decoder::attention_layer(const Layer& layer, const Cache& kv, const Part& part, Team::Walk& walk,
                              ThreadScratch& scratch) {
  walk.loop(kAttend, part.num_tiles * model_.kv_heads, [&](int item) {
    attend_tile(layer, kv, part.tiles[item / model_.kv_heads], item % model_.kv_heads, scratch.attention);
  });
  project_add(kAttnOut, layer.attn_out, attended_.rows, part, layer.post_attn_norm, walk, scratch);
}

// Finish the key, value and queries of one row and key/value head: norm, rotate, quantise, store.
void Decoder::append_row(const Layer& layer, const Cache& kv, int row, int kv_head) {
  const int dim = model_.head_dim, group = model_.heads / model_.kv_heads;
  float* q = qkv_.get() + size_t(row) * (model_.heads + 2 * model_.kv_heads) * dim;
  float* key = q + (model_.heads + kv_head) * dim;
  const float* value = key + model_.kv_heads * dim;
  const float* cos = layer.cos + size_t(position_[row]) * (dim / 2);
  const float* sin = layer.sin + size_t(position_[row]) * (dim / 2);
  norm_rotate(key, dim, layer.k_norm, model_.eps, cos, sin);
  append_token(kv, kv.block(block_[row], kv_head), slot_[row], key, value);
  for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
    norm_rotate(q + head * dim, dim, layer.q_norm, model_.eps, cos, sin);
    const size_t at = size_t(row) * model_.heads + head;
    const float scale = quantize_head(q + head * dim, dim, query_.get() + at * dim);
    query_scale_.get()[at] = scale * (model_.attention_scale * 1.4426950408889634f);  // scores in powers of two
  }
}

void Decoder::attend_tile(const Layer& layer, const Cache& kv, const TileRef& ref, int kv_head,
                          AttentionScratch& s) {
  const int dim = model_.head_dim, group = model_.heads / model_.kv_heads;
  const Tile tile{step_.block_tables + step_.table_starts[ref.seq], position_[ref.first], ref.tokens, group,
                  layer.window, kv_head};
  for (int r = 0; r < tile.rows(); r++) {
    const size_t at = size_t(ref.first + r / group) * model_.heads + kv_head * group + r % group;
    s.set_query(r, query_.get() + at * dim, query_scale_.get()[at], dim);
  }
  attend(kv, tile, s);
  for (int r = 0; r < tile.rows(); r++) {
    const int first_block = (kv_head * group + r % group) * (dim / kBlock);
    const Rows out = attended_.rows.from(ref.to + r / group);
    const float inverse = 1.0f / s.total[r];
    for (int b = 0; b < dim / kBlock; b++) {
      const float* sum = s.sum + size_t(2 * b * tile.rows() + r) * 16;
      quantize_block(load(sum) * inverse, load(sum + tile.rows() * 16) * inverse, out, first_block + b);
    }
  }
}

void Decoder::mlp_layer(const Layer& layer, const Part& part, Team::Walk& walk, ThreadScratch& scratch) {
  walk.loop(kNorm, part.rows, [&](int row) {
    finish_residual(part.hidden, row, layer.post_attn_norm);
    norm_quantize(part.hidden + size_t(row) * model_.hidden, layer.mlp_norm, model_.eps, input_.rows.from(row));
  });
  const int units = model_.inner / kBlock, row_blocks = (part.rows + kRowBlock - 1) / kRowBlock;
  auto compute = [&](int item, int place) {
    const int unit = item % units, first = item / units * kRowBlock;
    const int count = std::min(kRowBlock, part.rows - first);
    float* out = scratch.at(place, part.rows, 4);  // [row][half]: gated; then [row][half]: up
    float* up = out + count * kBlock;
    for (int half = 0; half < 2; half++) {
      panel_product(layer.gate, 2 * unit + half, input_.rows, first, count, out + half * kPanel, kBlock);
      panel_product(layer.up, 2 * unit + half, input_.rows, first, count, up + half * kPanel, kBlock);
    }
    for (int i = 0; i < count * kBlock; i += 16) store(out + i, gated(load(out + i), load(up + i), model_.activation));
  };
  auto publish = [&](int item, int place) {
    const int unit = item % units, first = item / units * kRowBlock;
    const int count = std::min(kRowBlock, part.rows - first);
    const float* out = scratch.at(place, part.rows, 4);
    for (int r = 0; r < count; r++, out += kBlock)
      quantize_block(load(out), load(out + kPanel), inner_.rows.from(first + r), unit);
  };
  walk.loop(kGateUp, units * row_blocks, scratch.places(part.rows, 4), compute, publish);
  project_add(kDown, layer.down, inner_.rows, part, layer.post_mlp_norm, walk, scratch);
}

// The sub-layer's output goes straight into the residual stream, or to branch_ when a norm comes first.
void Decoder::project_add(Phase phase, const Linear& w, const Rows& x, const Part& part, const float* post_norm,
                          Team::Walk& walk, ThreadScratch& scratch) {
  const int num_rows = part.rows;
  const int panels = w.panels(), row_blocks = (num_rows + kRowBlock - 1) / kRowBlock;
  auto compute = [&](int item, int place) {
    const int panel = item % panels, first = item / panels * kRowBlock;
    const int count = std::min(kRowBlock, num_rows - first);
    panel_product(w, panel, x, first, count, scratch.at(place, num_rows, 1), kPanel);
  };
  auto publish = [&](int item, int place) {
    const int panel = item % panels, first = item / panels * kRowBlock;
    const int count = std::min(kRowBlock, num_rows - first);
    const float* product = scratch.at(place, num_rows, 1);
    float* to = (post_norm ? branch_.get() : part.hidden) + size_t(first) * model_.hidden + panel * kPanel;
    for (int r = 0; r < count; r++, to += model_.hidden, product += kPanel)
      store(to, post_norm ? load(product) : load(to) + load(product));
  };
  walk.loop(phase, panels * row_blocks, scratch.places(num_rows, 1), compute, publish);
}

void Decoder::finish_residual(float* hidden, int row, const float* post_norm) {
  const size_t at = size_t(row) * model_.hidden;
  if (post_norm) norm_add(branch_.get() + at, post_norm, model_.eps, model_.hidden, hidden + at);
}

void Decoder::head(const Counts& counts, Team::Walk& walk, ThreadScratch& scratch) {
  const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int panels = model_.head.panels(), row_blocks = (counts.samples + kRowBlock - 1) / kRowBlock;
  walk.loop(kHead, panels * row_blocks, [&](int item) {
    if (scratch.step != num_steps_) {
      scratch.step = num_steps_;
      std::fill_n(scratch.best_value.data(), counts.samples * kPanel, -INFINITY);
      std::fill_n(scratch.best_token.data(), counts.samples * kPanel, 0);
    }
    const int panel = item % panels, first = item / panels * kRowBlock;
    const int count = std::min(kRowBlock, counts.samples - first);
    panel_product(model_.head, panel, sampled_.rows, first, count, scratch.product, kPanel);
    const vi token = lane + panel * kPanel;
    for (int r = 0; r < count; r++) {
      vf value = load(scratch.product + r * kPanel);
      if (step_.logits) store(step_.logits + (size_t(first + r) * panels + panel) * kPanel, value);
      float* best = scratch.best_value.data() + (first + r) * kPanel;
      int32_t* best_token = scratch.best_token.data() + (first + r) * kPanel;
      vi old = load_i(best_token);
      vi better = ((value > load(best)) | ((value == load(best)) & (token < old))) & (token < model_.vocab);
      store(best, select(better, value, load(best)));
      store_i(best_token, (better & token) | (~better & old));
    }
  });
}

// The greedy tokens, from what each thread found best; -1 where the logits are not finite.
void Decoder::choose(const Step& step) {
  for (int i = 0; i < step.num_samples; i++) {
    if (step.samplings && !step.samplings[i].is_plain()) continue;
    float best = -INFINITY;
    int32_t token = 0;
    for (const auto& scratch : scratch_)
      for (int lane = 0; scratch->step == num_steps_ && lane < kPanel; lane++) {
        const float value = scratch->best_value[i * kPanel + lane];
        const int32_t candidate = scratch->best_token[i * kPanel + lane];
        if (value > best || (value == best && candidate < token)) best = value, token = candidate;
      }
    step.tokens[i] = std::isfinite(best) ? token : -1;
  }
}

}  // namespace tf
