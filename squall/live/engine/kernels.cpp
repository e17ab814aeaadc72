// What a decode step spends its time on, for float32 on one CPU thread: narrow matrix products, rotary embedding with the
// write into the KV pool, and attention over KV blocks. Knows no tensors: flat arrays in, flat arrays out, nothing allocated.
// Written with GCC's vector extension, so the compiler picks the machine's own instructions (SSE, AVX, NEON, ...).

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int WIDTH = 8;
typedef float Lanes __attribute__((vector_size(4 * WIDTH)));
typedef float Loose __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));

inline Lanes load(const float* at) { return *reinterpret_cast<const Loose*>(at); }
inline void store(float* at, Lanes value) { *reinterpret_cast<Loose*>(at) = value; }
inline Lanes splat(float value) { return Lanes{} + value; }

inline float sum(Lanes v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

template <int STEP>
inline Lanes fold(Lanes a, Lanes b);  // adds neighbours STEP apart: lanes of a and of b that are still to be summed, interleaved
template <>
inline Lanes fold<1>(Lanes a, Lanes b) {
    return __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
}
template <>
inline Lanes fold<2>(Lanes a, Lanes b) {
    return __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
}
template <>
inline Lanes fold<4>(Lanes a, Lanes b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}

// The sums of eight vectors, as one.
inline Lanes sums(const Lanes v[WIDTH]) {
    const Lanes low = fold<2>(fold<1>(v[0], v[1]), fold<1>(v[2], v[3]));
    const Lanes high = fold<2>(fold<1>(v[4], v[5]), fold<1>(v[6], v[7]));
    return fold<4>(low, high);
}

// scores[t] = scale * q . k[t] for `count` keys, `stride` floats apart.
inline void score(float* scores, const float* q, const float* k, int count, int64_t stride, int dim, float scale) {
    for (int t = 0; t < count; t += WIDTH) {
        const int filled = count - t < WIDTH ? count - t : WIDTH;
        const float* row[WIDTH];
        for (int lane = 0; lane < WIDTH; ++lane) row[lane] = k + (t + (lane < filled ? lane : 0)) * stride;
        Lanes acc[WIDTH] = {};
        int d = 0;
        for (; d + WIDTH <= dim; d += WIDTH) {
            const Lanes query = load(q + d);
            for (int lane = 0; lane < WIDTH; ++lane) acc[lane] += query * load(row[lane] + d);
        }
        Lanes total = sums(acc);
        for (; d < dim; ++d)
            for (int lane = 0; lane < WIDTH; ++lane) total[lane] += q[d] * row[lane][d];
        total *= splat(scale);
        if (filled == WIDTH) {
            store(scores + t, total);
        } else {
            for (int lane = 0; lane < filled; ++lane) scores[t + lane] = total[lane];
        }
    }
}

// out += sum of weights[t] * v[t] over `count` values, `stride` floats apart.
inline void gather(float* out, const float* weights, const float* v, int count, int64_t stride, int dim) {
    int d = 0;
    for (; d + 4 * WIDTH <= dim; d += 4 * WIDTH) {
        Lanes acc[4];
        for (int j = 0; j < 4; ++j) acc[j] = load(out + d + j * WIDTH);
        for (int t = 0; t < count; ++t) {
            const Lanes weight = splat(weights[t]);
            for (int j = 0; j < 4; ++j) acc[j] += weight * load(v + t * stride + d + j * WIDTH);
        }
        for (int j = 0; j < 4; ++j) store(out + d + j * WIDTH, acc[j]);
    }
    for (; d < dim; ++d)
        for (int t = 0; t < count; ++t) out[d] += weights[t] * v[t * stride + d];
}

// exp of values <= 0: 2^round(x / ln 2) times a polynomial on the rest; relative error below 2e-7.
inline Lanes exp_of_negative(Lanes x) {
    x = x < splat(-87.0f) ? splat(-87.0f) : x;
    const Lanes scaled = x * splat(1.44269504f);
    const Ints whole = __builtin_convertvector(scaled - splat(0.5f), Ints);  // truncation rounds negative numbers up
    const Lanes n = __builtin_convertvector(whole, Lanes);
    const Lanes r = (x - n * splat(0.693359375f)) - n * splat(-2.12194440e-4f);
    Lanes p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    const Ints power = (whole + 127) << 23;
    Lanes two_to_n;
    std::memcpy(&two_to_n, &power, sizeof power);
    return p * two_to_n;
}

// Four rows of w times COLUMNS rows of x. A row of y is summed in the same order whatever else is in the batch.
template <int COLUMNS>
inline void tile(float* y, const float* x, const float* w, const float* bias, int n, int k) {
    Lanes acc[COLUMNS][4] = {};
    int i = 0;
    for (; i + WIDTH <= k; i += WIDTH) {
        Lanes in[COLUMNS];
        for (int c = 0; c < COLUMNS; ++c) in[c] = load(x + (int64_t)c * k + i);
        for (int r = 0; r < 4; ++r) {
            const Lanes weight = load(w + (int64_t)r * k + i);
            for (int c = 0; c < COLUMNS; ++c) acc[c][r] += weight * in[c];
        }
    }
    for (int c = 0; c < COLUMNS; ++c) {
        const Lanes halves = fold<2>(fold<1>(acc[c][0], acc[c][1]), fold<1>(acc[c][2], acc[c][3]));
        for (int r = 0; r < 4; ++r) {
            float total = halves[r] + halves[r + 4];
            for (int j = i; j < k; ++j) total += x[(int64_t)c * k + j] * w[(int64_t)r * k + j];
            y[(int64_t)c * n + r] = total + (bias ? bias[r] : 0.0f);
        }
    }
}

// scores become weights that sum to 1; the row has room up to the next multiple of WIDTH.
inline void softmax(float* row, int count) {
    float most = row[0];
    for (int t = 1; t < count; ++t) most = row[t] > most ? row[t] : most;
    const int padded = (count + WIDTH - 1) / WIDTH * WIDTH;
    for (int t = count; t < padded; ++t) row[t] = most;
    Lanes total{};
    for (int t = 0; t < padded; t += WIDTH) {
        Lanes e = exp_of_negative(load(row + t) - splat(most));
        for (int lane = count - t; lane < WIDTH; ++lane) e[lane] = 0;
        store(row + t, e);
        total += e;
    }
    const Lanes inverse = splat(1.0f / sum(total));
    for (int t = 0; t < padded; t += WIDTH) store(row + t, load(row + t) * inverse);
}

inline void rotate(float* head, const float* cosine, const float* sine, int half) {
    for (int i = 0; i < half; ++i) {
        const float a = head[i], b = head[half + i];
        head[i] = a * cosine[i] - b * sine[i];
        head[half + i] = b * cosine[i] + a * sine[i];
    }
}

}  // namespace

extern "C" {

// y[m, n] = x[m, k] w[n, k]^T + bias[n]; n is a multiple of 4, bias may be null. For few rows: w is read once, from memory.
void squall_linear(float* y, const float* x, const float* w, const float* bias, int m, int n, int k) {
    for (int row = 0; row < n; row += 4) {
        const float* weights = w + (int64_t)row * k;
        const float* offset = bias ? bias + row : nullptr;
        int c = 0;
        for (; c + 3 <= m; c += 3) tile<3>(y + (int64_t)c * n + row, x + (int64_t)c * k, weights, offset, n, k);
        if (c + 2 == m) tile<2>(y + (int64_t)c * n + row, x + (int64_t)c * k, weights, offset, n, k);
        if (c + 1 == m) tile<1>(y + (int64_t)c * n + row, x + (int64_t)c * k, weights, offset, n, k);
    }
}

// Rotates q and k of qkv[tokens, heads + 2 kv_heads, dim] in place by cosine, sine[tokens, dim / 2] and writes k and v to
// their slots in keys, values[blocks * block_size, kv_heads, dim].
void squall_rope_store(float* qkv, const float* cosine, const float* sine, const int64_t* slots, float* keys, float* values,
                       int tokens, int heads, int kv_heads, int dim) {
    const int half = dim / 2, width = kv_heads * dim;
    for (int t = 0; t < tokens; ++t) {
        float* token = qkv + (int64_t)t * (heads + 2 * kv_heads) * dim;
        for (int h = 0; h < heads + kv_heads; ++h) rotate(token + h * dim, cosine + t * half, sine + t * half, half);
        std::memcpy(keys + slots[t] * width, token + heads * dim, sizeof(float) * width);
        std::memcpy(values + slots[t] * width, token + (heads + kv_heads) * dim, sizeof(float) * width);
    }
}

// One query token a sequence against its last `window` tokens (0: all) in blocks of the pool.
//   out[sequences, heads, dim]; qkv as above; tables[sequences, table_width] of block numbers; lengths[sequences] counts the
//   new token too; scores is scratch for `heads` rows of `stride` floats, stride >= the longest length + block_size + 8.
void squall_attend(float* out, const float* qkv, const float* keys, const float* values, const int32_t* tables,
                   const int32_t* lengths, float* scores, int sequences, int heads, int kv_heads, int dim, int block_size,
                   int table_width, int stride, int window, float scale) {
    const int group = heads / kv_heads;
    const int64_t width = (int64_t)kv_heads * dim;
    for (int s = 0; s < sequences; ++s) {
        const float* query = qkv + (int64_t)s * (heads + 2 * kv_heads) * dim;
        const int32_t* table = tables + (int64_t)s * table_width;
        const int end = lengths[s], begin = window > 0 && end > window ? end - window : 0;
        float* o = out + (int64_t)s * heads * dim;
        std::memset(o, 0, sizeof(float) * heads * dim);
        for (int at = begin, next; at < end; at = next) {
            next = (at / block_size + 1) * block_size < end ? (at / block_size + 1) * block_size : end;
            const float* k = keys + ((int64_t)table[at / block_size] * block_size + at % block_size) * width;
            for (int h = 0; h < heads; ++h)
                score(scores + (int64_t)h * stride + at - begin, query + h * dim, k + h / group * dim, next - at, width, dim, scale);
        }
        for (int h = 0; h < heads; ++h) softmax(scores + (int64_t)h * stride, end - begin);
        for (int at = begin, next; at < end; at = next) {
            next = (at / block_size + 1) * block_size < end ? (at / block_size + 1) * block_size : end;
            const float* v = values + ((int64_t)table[at / block_size] * block_size + at % block_size) * width;
            for (int h = 0; h < heads; ++h)
                gather(o + h * dim, scores + (int64_t)h * stride + at - begin, v + h / group * dim, next - at, width, dim);
        }
    }
}

}  // extern "C"
