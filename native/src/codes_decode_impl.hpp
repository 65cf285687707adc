// Pages of codes as plain numbers, written once over the vectors of simd_*.hpp; included by kernels_impl.hpp.
//
// The orders of codes and of raw pages have the same lanes: 16 tokens of keys, 16 dimensions of values. A vector of codes
// holds 4 or 8 neighbours of each lane, so that decoding moves nothing across lanes.
#pragma once

namespace h3::H3_ISA {

// number = scale * code + offset: the product of 11 and 8 bits is exact, so that one rounding or two are the same.
template <int Byte>
inline Vec number_at(const Bytes& quad, const Vec& scale, const Vec& offset) {
  return add(mul(byte_at<8 * Byte>(quad), scale), offset);
}

// Where a pair of neighbours goes in a raw page whose vectors lie `stride` bytes apart.
template <class E>
inline void store_neighbours(char* p, int stride, const Vec& first, const Vec& second) {
  if constexpr (E::kPack == 2) {
    store_pairs(p, first, second);
  } else {
    store(reinterpret_cast<float*>(p), first);
    store(reinterpret_cast<float*>(p + stride), second);
  }
}

// Keys of a raw page of fp32 or bf16, [D / P][64][P].
template <class E, class K>
inline void decode_keys(const Page& page, int head_dim, char* target) {
  constexpr int kStride = kPageTokens * 4;  // of vectors of one cluster
  for (int c = 0; c < clusters_of(page); ++c) {
    const K keys(page, c, head_dim);
    const Vec scale = load_scale(page, kKeyScale, c);
    const Vec offset = load_scale(page, kKeyOffset, c);
    char* p = target + c * kLanes * 4;
    for (int s = 0; s < head_dim / (4 * K::kQuads); ++s) {
      Bytes quads[K::kQuads];
      keys.load(s, quads);
      for (const Bytes& quad : quads) {
        store_neighbours<E>(p, kStride, number_at<0>(quad, scale, offset), number_at<1>(quad, scale, offset));
        p += 2 / E::kPack * kStride;
        store_neighbours<E>(p, kStride, number_at<2>(quad, scale, offset), number_at<3>(quad, scale, offset));
        p += 2 / E::kPack * kStride;
      }
    }
  }
}

// Values of a raw page, [panel][64 / P][width][P]. Past the page's count they are zero up to the group's end.
template <class E, class V>
inline void decode_values(const Page& page, int head_dim, char* target) {
  constexpr int kGroup = 4 * V::kQuads;
  alignas(64) float scales[kPageTokens], offsets[kPageTokens];
  for (int c = 0; c < clusters_of(page); ++c) {
    const Bits keep = lanes_below(page.count - c * kLanes);
    store(scales + c * kLanes, select(keep, load_scale(page, kValueScale, c), zero()));
    store(offsets + c * kLanes, select(keep, load_scale(page, kValueOffset, c), zero()));
  }
  const auto* codes = reinterpret_cast<const char*>(page.values);
  const int groups = (page.count + kGroup - 1) / kGroup;
  for (int g = 0; g < groups; ++g) {
    for (int d = 0; d < head_dim; d += kLanes, codes += 64) {
      const int panel = d / kPanel * kPanel;
      const int width = head_dim - panel < kPanel ? head_dim - panel : kPanel;
      const int stride = width * 4;  // from one token, or pair, to the next
      char* p = target + panel * kPageTokens * 4 / E::kPack + (d - panel) * 4;
      Bytes quads[V::kQuads];
      V::load(codes, quads);
      for (int i = 0; i < V::kQuads; ++i) {
        const int t = g * kGroup + 4 * i;
        const auto number = [&]<int J>() {
          const Vec whole = number_at<J>(quads[i], fill(scales[t + J]), fill(offsets[t + J]));
          if (page.residues == 0) return whole;
          return add(whole, mul(load_residues(page, t + J, d, head_dim), fill(scales[t + J])));
        };
        store_neighbours<E>(p + t / E::kPack * stride, stride, number.template operator()<0>(),
                            number.template operator()<1>());
        store_neighbours<E>(p + (t + 2) / E::kPack * stride, stride, number.template operator()<2>(),
                            number.template operator()<3>());
      }
    }
  }
}

template <class E, class K, class V>
void decode_page(const Page& page, int head_dim, void* keys, void* values) {
  decode_keys<E, K>(page, head_dim, static_cast<char*>(keys));
  decode_values<E, V>(page, head_dim, static_cast<char*>(values));
}

template <class K, class V>
void decode_rows(const Page& page, int head_dim, float* keys, float* values) {
  alignas(64) thread_local float scratch[kPageTokens * kHeadDimMax];
  decode_keys<Fp32, K>(page, head_dim, reinterpret_cast<char*>(scratch));
  for (int d = 0; d < head_dim; ++d)
    for (int t = 0; t < page.count; ++t) keys[t * head_dim + d] = scratch[d * kPageTokens + t];
  decode_values<Fp32, V>(page, head_dim, reinterpret_cast<char*>(scratch));
  for (int d = 0; d < head_dim; d += kLanes) {
    const int panel = d / kPanel * kPanel;
    const int width = head_dim - panel < kPanel ? head_dim - panel : kPanel;
    const float* source = scratch + panel * kPageTokens + d - panel;
    for (int t = 0; t < page.count; ++t) store(values + t * head_dim + d, load(source + t * width));
  }
}

}  // namespace h3::H3_ISA
