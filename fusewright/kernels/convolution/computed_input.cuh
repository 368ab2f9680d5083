// A convolution's input that is computed where it is read, instead of by a loop before it. A `Body`
// has three functions: `read` returns what an element needs from memory (`Raw`), `factors` returns
// what all elements of an image and channel share (`Factors`), and `value` computes the element
// from both.
#pragma once

#include "convolution/operands.cuh"

namespace fw {

// kByFour: channels are contiguous in what it reads, and are processed four at a time.
template <class Body, bool kByFour>
struct ComputedInput {
  // Adding to a location moves it along the channels.
  struct Location {
    int image, channel, z, y, x;

    FW_FN Location operator+(int64_t channels) const {
      return {image, channel + int(channels), z, y, x};
    }
    FW_FN Location& operator+=(int64_t channels) {
      channel += int(channels);
      return *this;
    }
  };
  static constexpr int64_t channel_stride = 1;
  static constexpr bool kInMemory = false;
  // Thread blocks per SM of the kernel that stages the input. Loaded values wait in registers.
  static constexpr int kBlocks = sizeof(typename Body::Raw) > 4 ? 2 : 3;

  Body body;

  bool by_channels(int) const { return kByFour; }
  template <class Function>
  FW_FN static void by_layout(bool, const Function& call) {
    call(std::bool_constant<kByFour>());
  }
  bool has_near_channels() const { return true; }
  FW_FN Location location(int image, int channel, int z, int y, int x) const {
    return {image, channel, z, y, x};
  }
  FW_FN typename Body::Raw raw(const Location& from) const {
    return body.read(from.image, from.channel, from.z, from.y, from.x);
  }
  FW_FN float number(const typename Body::Raw& raw, const typename Body::Factors& factors,
                     const Location& from) const {
    return body.value(raw, factors, from.image, from.channel, from.z, from.y, from.x);
  }
  FW_FN float at(const Location& from) const {
    return number(raw(from), body.factors(from.image, from.channel), from);
  }
  // Zero outside of the input. There is no branch around the loads.
  FW_FN float at(const Location& from, bool inside) const {
    const float found = at(inside ? from : Location{});
    return inside ? found : 0.f;
  }
};

}  // namespace fw
