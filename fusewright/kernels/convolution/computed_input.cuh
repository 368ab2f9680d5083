// A convolution's input that nobody has written: what a loop before it would have is computed where it
// is read. A `Body` has, by image, channel, z, y and x, what is read of memory for a number (`Raw`), and
// by image and channel what all numbers of these share (`Factors`); of both it makes the number.
#pragma once

#include "convolution/operands.cuh"

namespace fw {

// kByFour: channels lie side by side in what it reads, and go by four.
template <class Body, bool kByFour>
struct ComputedInput {
  // Places go on by channels.
  struct Place {
    int image, channel, z, y, x;

    FW_FN Place operator+(int64_t channels) const {
      return {image, channel + int(channels), z, y, x};
    }
    FW_FN Place& operator+=(int64_t channels) {
      channel += int(channels);
      return *this;
    }
  };
  static constexpr int64_t channel_stride = 1;
  static constexpr bool kInMemory = false;
  // Of a processor that lays out lines: what is read of memory waits in registers.
  static constexpr int kBlocks = sizeof(typename Body::Raw) > 4 ? 2 : 3;

  Body body;

  bool by_channels(int) const { return kByFour; }
  template <class Call>
  FW_FN static void by_layout(bool, const Call& call) {
    call(std::bool_constant<kByFour>());
  }
  bool has_near_channels() const { return true; }
  FW_FN Place place(int image, int channel, int z, int y, int x) const {
    return {image, channel, z, y, x};
  }
  FW_FN typename Body::Raw raw(const Place& from) const {
    return body.read(from.image, from.channel, from.z, from.y, from.x);
  }
  FW_FN float number(const typename Body::Raw& raw, const typename Body::Factors& factors,
                     const Place& from) const {
    return body.value(raw, factors, from.image, from.channel, from.z, from.y, from.x);
  }
  FW_FN float at(const Place& from) const {
    return number(raw(from), body.factors(from.image, from.channel), from);
  }
  // Zero outside, without a branch around what is read.
  FW_FN float at(const Place& from, bool inside) const {
    const float found = at(inside ? from : Place{});
    return inside ? found : 0.f;
  }
};

}  // namespace fw
