#include "decoder.hpp"

#include <cmath>

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
      team_(l.num_threads) {
  for (int id = 0; id < team_.size(); id++) {
    scratch_.push_back(std::make_unique<ThreadScratch>());
    scratch_.back()->best_value.resize(size_t(l.max_samples) * kPanel);
    scratch_.back()->best_token.resize(size_t(l.max_samples) * kPanel);
  }
}

Cache Decoder::cache(int layer) const {
  return Cache{cache_.get() + layer * (cache_bytes(model_, limits_.num_blocks) / model_.num_layers), model_.kv_heads,
               model_.head_dim};
}

void Decoder::plan_tiles(const Step& step) {
  const int group = model_.heads / model_.kv_heads, most = std::max(1, kTileRows / group);
  tiles_.clear();
  for (int seq = 0; seq < step.num_seqs; seq++) {
    const int begin = step.row_starts[seq], end = step.row_starts[seq + 1];
    const int32_t* table = step.block_tables + step.table_starts[seq];
    for (int row = begin; row < end; row++) {
      position_[row] = step.first_positions[seq] + row - begin;
      block_[row] = table[position_[row] / kCacheBlock];
      slot_[row] = position_[row] % kCacheBlock;
    }
    for (int row = begin; row < end; row += most) tiles_.push_back({seq, row, std::min(most, end - row)});
  }
}

void Decoder::step(const Step& step) {
  plan_tiles(step);
  team_.run([&](int id) { thread(step, id); });
  choose(step);
}

void Decoder::thread(const Step& step, int id) {
  ThreadScratch& scratch = *scratch_[id];
  team_.loop(step.num_rows, [&](int row) {
    dequantize_channel(model_.embed, step.token_ids[row], model_.embed_scale, hidden_.get() + size_t(row) * model_.hidden);
  });
  for (int index = 0; index < model_.num_layers; index++) {
    const float* pending = index ? layers_[index - 1].post_mlp_norm : nullptr;
    team_.loop(step.num_rows, [&](int row) {
      finish_residual(row, pending);
      norm_quantize(hidden_.get() + size_t(row) * model_.hidden, layers_[index].attn_norm, model_.eps,
                    input_.rows.from(row));
    });
    attention_layer(step, layers_[index], index, scratch);
    mlp_layer(step, layers_[index], scratch);
  }
  team_.loop(step.num_samples, [&](int i) {
    const int row = step.sample_rows[i];
    finish_residual(row, layers_.back().post_mlp_norm);
    norm_quantize(hidden_.get() + size_t(row) * model_.hidden, model_.final_norm, model_.eps, sampled_.rows.from(i));
  });
  float* logits = step.logits || !step.samplings ? step.logits : logits_.get();
  head(step, logits, id);
  if (step.samplings)
    team_.loop(step.num_samples, [&](int i) {
      const Sampling& s = step.samplings[i];
      float* row = logits + size_t(i) * model_.head.panels() * kPanel;
      if (s.temperature > 0.0f || s.num_banned) step.tokens[i] = sample(row, model_.vocab, s, step.banned + s.first_banned);
    });
}

void Decoder::attention_layer(const Step& step, const Layer& layer, int index, ThreadScratch& scratch) {
  const Cache kv = cache(index);
  const int q_columns = model_.heads * model_.head_dim, kv_columns = model_.kv_heads * model_.head_dim;
  const size_t stride = q_columns + 2 * kv_columns;
  const int q_panels = layer.q.panels(), kv_panels = layer.k.panels();
  const int panels = q_panels + 2 * kv_panels, row_blocks = (step.num_rows + kRowBlock - 1) / kRowBlock;
  team_.loop(panels * row_blocks, [&](int item) {
    const int panel = item % panels, first = item / panels * kRowBlock;
    const int count = std::min(kRowBlock, step.num_rows - first);
    float* out = qkv_.get() + first * stride + panel * kPanel;  // the three outputs lie side by side
    if (panel < q_panels)
      panel_product(layer.q, panel, input_.rows, first, count, out, stride);
    else if (panel < q_panels + kv_panels)
      panel_product(layer.k, panel - q_panels, input_.rows, first, count, out, stride);
    else
      panel_product(layer.v, panel - q_panels - kv_panels, input_.rows, first, count, out, stride);
  });
  team_.loop(step.num_rows * model_.kv_heads, [&](int item) {
    append_row(layer, kv, item / model_.kv_heads, item % model_.kv_heads);
  });
  team_.loop(int(tiles_.size()) * model_.kv_heads, [&](int item) {
    attend_tile(step, layer, kv, tiles_[item / model_.kv_heads], item % model_.kv_heads, scratch.attention);
  });
  project_add(layer.attn_out, attended_.rows, step.num_rows, layer.post_attn_norm, scratch);
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

void Decoder::attend_tile(const Step& step, const Layer& layer, const Cache& kv, const TileRef& ref, int kv_head,
                          AttentionScratch& s) {
  const int dim = model_.head_dim, group = model_.heads / model_.kv_heads;
  const Tile tile{step.block_tables + step.table_starts[ref.seq], position_[ref.first], ref.tokens, group,
                  layer.window, kv_head};
  for (int r = 0; r < tile.rows(); r++) {
    const size_t at = size_t(ref.first + r / group) * model_.heads + kv_head * group + r % group;
    s.set_query(r, query_.get() + at * dim, query_scale_.get()[at], dim);
  }
  attend(kv, tile, s);
  for (int r = 0; r < tile.rows(); r++) {
    const int first_block = (kv_head * group + r % group) * (dim / kBlock);
    const Rows out = attended_.rows.from(ref.first + r / group);
    const float inverse = 1.0f / s.total[r];
    for (int b = 0; b < dim / kBlock; b++) {
      const float* sum = s.sum + size_t(2 * b * tile.rows() + r) * 16;
      quantize_block(load(sum) * inverse, load(sum + tile.rows() * 16) * inverse, out, first_block + b);
    }
  }
}

void Decoder::mlp_layer(const Step& step, const Layer& layer, ThreadScratch& scratch) {
  team_.loop(step.num_rows, [&](int row) {
    finish_residual(row, layer.post_attn_norm);
    norm_quantize(hidden_.get() + size_t(row) * model_.hidden, layer.mlp_norm, model_.eps, input_.rows.from(row));
  });
  const int units = model_.inner / kBlock, row_blocks = (step.num_rows + kRowBlock - 1) / kRowBlock;
  team_.loop(units * row_blocks, [&](int item) {
    const int unit = item % units, first = item / units * kRowBlock;
    const int count = std::min(kRowBlock, step.num_rows - first);
    for (int half = 0; half < 2; half++) {
      panel_product(layer.gate, 2 * unit + half, input_.rows, first, count, scratch.product[half], kPanel);
      panel_product(layer.up, 2 * unit + half, input_.rows, first, count, scratch.product[2 + half], kPanel);
    }
    for (int r = 0; r < count; r++) {
      vf lo = gated(load(scratch.product[0] + r * kPanel), load(scratch.product[2] + r * kPanel), model_.activation);
      vf hi = gated(load(scratch.product[1] + r * kPanel), load(scratch.product[3] + r * kPanel), model_.activation);
      quantize_block(lo, hi, inner_.rows.from(first + r), unit);
    }
  });
  project_add(layer.down, inner_.rows, step.num_rows, layer.post_mlp_norm, scratch);
}

// The sub-layer's output goes straight into the residual stream, or to branch_ when a norm comes first.
void Decoder::project_add(const Linear& w, const Rows& x, int num_rows, const float* post_norm, ThreadScratch& scratch) {
  const int panels = w.panels(), row_blocks = (num_rows + kRowBlock - 1) / kRowBlock;
  team_.loop(panels * row_blocks, [&](int item) {
    const int panel = item % panels, first = item / panels * kRowBlock;
    const int count = std::min(kRowBlock, num_rows - first);
    const size_t at = size_t(first) * model_.hidden + panel * kPanel;
    if (post_norm) {
      panel_product(w, panel, x, first, count, branch_.get() + at, model_.hidden);
      return;
    }
    panel_product(w, panel, x, first, count, scratch.product[0], kPanel);
    for (int r = 0; r < count; r++) {
      float* to = hidden_.get() + at + size_t(r) * model_.hidden;
      store(to, load(to) + load(scratch.product[0] + r * kPanel));
    }
  });
}

void Decoder::finish_residual(int row, const float* post_norm) {
  const size_t at = size_t(row) * model_.hidden;
  if (post_norm) norm_add(branch_.get() + at, post_norm, model_.eps, model_.hidden, hidden_.get() + at);
}

void Decoder::head(const Step& step, float* logits, int id) {
  ThreadScratch& scratch = *scratch_[id];
  const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  std::fill_n(scratch.best_value.data(), step.num_samples * kPanel, -INFINITY);
  std::fill_n(scratch.best_token.data(), step.num_samples * kPanel, 0);
  const int panels = model_.head.panels(), row_blocks = (step.num_samples + kRowBlock - 1) / kRowBlock;
  team_.loop(panels * row_blocks, [&](int item) {
    const int panel = item % panels, first = item / panels * kRowBlock;
    const int count = std::min(kRowBlock, step.num_samples - first);
    panel_product(model_.head, panel, sampled_.rows, first, count, scratch.product[0], kPanel);
    const vi token = lane + panel * kPanel;
    for (int r = 0; r < count; r++) {
      vf value = load(scratch.product[0] + r * kPanel);
      if (logits) store(logits + (size_t(first + r) * panels + panel) * kPanel, value);
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
    if (step.samplings && (step.samplings[i].temperature > 0.0f || step.samplings[i].num_banned)) continue;
    float best = -INFINITY;
    int32_t token = 0;
    for (const auto& scratch : scratch_)
      for (int lane = 0; lane < kPanel; lane++) {
        const float value = scratch->best_value[i * kPanel + lane];
        const int32_t candidate = scratch->best_token[i * kPanel + lane];
        if (value > best || (value == best && candidate < token)) best = value, token = candidate;
      }
    step.tokens[i] = std::isfinite(best) ? token : -1;
  }
}

}  // namespace tf
