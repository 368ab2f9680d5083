// What generated functors have in common: the accumulators of a sweep, what they inherit, and the
// first lines of their functions. A functor says how an element is loaded (Elem, load), what is
// done with it in each sweep (visit), and what is known of its row (Row, begin, finish, store).
#pragma once

#include <cstddef>
#include <utility>

#include "scalar/accumulators.hpp"
#include "scalar/python.hpp"

// A function with arithmetic.
#define FW_MATH static FW_DEVICE

namespace fw {

template <std::size_t kAt, class Sum>
struct Numbered {
  Sum sum;
};

// The accumulators of one sweep, in order.
template <class Numbers, class... Sums>
struct Together;
template <std::size_t... kAt, class... Sums>
struct Together<std::index_sequence<kAt...>, Sums...> : Numbered<kAt, Sums>... {
  static constexpr bool kEmpty = sizeof...(Sums) == 0, kMeets = (Sums::kMeets || ...);

  template <class Sum>
  FW_FN static void join_met(Sum& sum, const Sum& other) {
    if constexpr (Sum::kMeets) {
      sum.combine_met(other);
    } else {
      sum.combine(other);
    }
  }
  template <class Sum, class Largest>
  FW_FN static void meet_one(Sum& sum, const Largest& largest) {
    if constexpr (Sum::kMeets) sum.meet(largest);
  }
  FW_FN void combine(const Together& other) {
    (Numbered<kAt, Sums>::sum.combine(other.Numbered<kAt, Sums>::sum), ...);
  }
  // Threads first agree on a base, then only add. Some reductions are faster so.
  template <class Largest>
  FW_FN void meet(const Largest& largest) {
    (meet_one(Numbered<kAt, Sums>::sum, largest), ...);
  }
  FW_FN void combine_met(const Together& other) {
    (join_met(Numbered<kAt, Sums>::sum, other.Numbered<kAt, Sums>::sum), ...);
  }
  // What takes the next few elements, until `take` (see Running).
  FW_FN auto few() const {
    using Few = Together<std::index_sequence<kAt...>, decltype(std::declval<Sums>().few())...>;
    return Few{{Numbered<kAt, Sums>::sum.few()}...};
  }
  template <class... Few>
  FW_FN void take(const Together<std::index_sequence<kAt...>, Few...>& few) {
    (Numbered<kAt, Sums>::sum.take(few.Numbered<kAt, Few>::sum), ...);
  }
  FW_FN auto lane(int v) const {
    using One = Together<std::index_sequence<kAt...>, decltype(std::declval<Sums>().lane(0))...>;
    return One{{Numbered<kAt, Sums>::sum.lane(v)}...};
  }
  // A sum of one lane has taken all lanes of a vector.
  FW_FN auto folded(int n) const {
    using One = Together<std::index_sequence<kAt...>, decltype(std::declval<Sums>().folded(0))...>;
    return One{{Numbered<kAt, Sums>::sum.folded(Sums::kLanes == 1 ? 1 : n)}...};
  }
};

template <std::size_t kAt, class Sum>
FW_FN Sum& nth(Numbered<kAt, Sum>& of) {
  return of.sum;
}
template <std::size_t kAt, class Sum>
FW_FN const Sum& nth(const Numbered<kAt, Sum>& of) {
  return of.sum;
}

template <class... Sums>
using Reductions = Together<std::index_sequence_for<Sums...>, Sums...>;

// The base of functors. Its functions do nothing: a functor that needs one has its own.
struct NoMath {};
template <class Math = NoMath>
struct Functor : Math {
  static constexpr bool kRest = false, kTail = false, kStrided = false, kByTwo = false;
  static constexpr bool kOuterRest = false, kSplit = false, kByPosition = false;
  struct Factors {};
  template <int V, class... T>
  FW_DEVICE void compute(const T&...) const {}
  template <class... T>
  FW_DEVICE void load(const T&...) const {}
  template <class... T>
  FW_DEVICE void finish(const T&...) const {}
  template <class... T>
  FW_DEVICE void store(const T&...) const {}
  template <int V, class Of>
  FW_FN Reductions<> accumulators(Of) const {
    return {};
  }
};

// The arguments of an entry point, in the order of a functor's members: they convert to it.
struct Pointer {
  void* at;
  template <class T>
  operator T*() const {
    return static_cast<T*>(at);
  }
};
template <class T>
struct Number {
  T n;
  template <class Of>
  operator Of() const {
    return static_cast<Of>(n);
  }
};
inline Pointer member(void* at) { return {at}; }
template <class T>
Number<T> member(T n) {
  return {n};
}
template <class... Arguments>
auto maker(Arguments... each) {
  return [=](auto* body) { return std::remove_pointer_t<decltype(body)>{{}, member(each)...}; };
}
template <class Make>
struct Members {
  Make make;
  template <class Body>
  operator Body() const {
    return make(static_cast<Body*>(nullptr));
  }
};
template <class... Arguments>
auto members(Arguments... each) {
  const auto make = maker(each...);
  return Members<decltype(make)>{make};
}

// The same for one functor, with indices of any type.
template <template <typename> class Body, class Make>
struct FunctorOf {
  Make make;
  template <typename I>
  Body<I> of() const {
    return make(static_cast<Body<I>*>(nullptr));
  }
};
template <template <typename> class Body, class... Arguments>
auto functor(Arguments... each) {
  const auto make = maker(each...);
  return FunctorOf<Body, decltype(make)>{make};
}

}  // namespace fw

// The first lines of a functor's functions. I is the type of indices; q, m and l are indices.
#define FW_EXTENTS(LANES, REST)                 \
  FW_FN I lane_extent() const { return LANES; } \
  FW_FN I rest_extent() const { return REST; }
#define FW_OUTER(OUTER, LANES, INNER)                 \
  FW_FN I outer_extent() const { return OUTER; }      \
  FW_FN I outer_lane_extent() const { return LANES; } \
  FW_FN I inner_extent() const { return INNER; }
#define FW_REDUCES(PHASE, ...)                                             \
  template <int V>                                                         \
  FW_FN fw::Reductions<__VA_ARGS__> accumulators(fw::Phase<PHASE>) const { \
    return {};                                                             \
  }
#define FW_LOAD()  \
  template <int V> \
  FW_DEVICE void load(Elem<V>& elem, I q, I l) const
#define FW_VISIT() \
  template <int V> \
  FW_DEVICE void visit(const Elem<V>& elem, I q, I l, int n) const
#define FW_BEGIN() \
  template <int V> \
  FW_DEVICE void begin(Row<V>& row, I q, I l, int n) const
#define FW_LOADS()               \
  template <int K, int V, int W> \
  FW_DEVICE void load(fw::Phase<K>, Elem<V>& elem, const Row<W>& row, I q, I l) const
#define FW_SWEEP(PHASE)                                                                         \
  template <int V, int W, class Acc>                                                            \
  FW_DEVICE void visit(fw::Phase<PHASE>, const Elem<V>& elem, const Row<W>& row, Acc& acc, I q, \
                       I l, int n) const
#define FW_KEEPING_SWEEP(PHASE)                                                                \
  template <int V, int W, class Acc>                                                           \
  FW_DEVICE void visit(fw::Phase<PHASE>, Elem<V>& elem, const Row<W>& row, Acc& acc, I q, I l, \
                       int n) const
#define FW_END()                                                                  \
  template <int V, int W, class Acc>                                              \
  FW_DEVICE void visit(fw::Phase<0>, const Elem<V>& elem, const Factors& factors, \
                       const Row<W>& row, Acc& acc, I q, I l, int n) const
#define FW_FINISH(PHASE)      \
  template <int V, class Acc> \
  FW_DEVICE void finish(fw::Phase<PHASE>, Row<V>& row, const Acc& acc, int n) const
#define FW_STORE() \
  template <int V> \
  FW_DEVICE void store(const Row<V>& row, int n) const
#define FW_GIVE(NAME)                                            \
  template <int V>                                               \
  FW_DEVICE void give(Elem<V>& elem, int v, float value) const { \
    elem.NAME.set(v, value);                                     \
  }
