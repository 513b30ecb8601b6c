#include "routing.h"

#include <cmath>
#include <cstdlib>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <tuple>

#include "settings.h"
#include "stream.h"

namespace sim {
namespace {

// As `ds_npu sim` writes it: "EXPONENT SEED". The exponent 0 is the uniform distribution.
struct Routing {
  double exponent;
  std::uint64_t seed;
};

std::optional<Routing> routing() {
  const std::string& text = settings().routing;
  if (text.empty()) return settings().dry ? std::optional<Routing>({0, 0}) : std::nullopt;
  char* rest = nullptr;
  const double exponent = std::strtod(text.c_str(), &rest);
  return Routing{exponent, std::strtoull(rest, nullptr, 10)};
}

// Expert order[i] is chosen with a weight of 1 / (i + 1) ^ exponent; the order is that of all ranks.
at::Tensor draw(const Routing& given, int npu, int64_t rows, int64_t experts, int64_t k) {
  std::mt19937_64 shared(given.seed), own(given.seed * 1000003 + static_cast<std::uint64_t>(npu) + 1);
  std::vector<int64_t> order(static_cast<std::size_t>(experts));
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[shared() % i]);
  at::Tensor keys = at::empty({rows, experts}, at::kFloat);
  auto* key = keys.data_ptr<float>();
  for (int64_t row = 0; row < rows; ++row)
    for (std::size_t i = 0; i < order.size(); ++i) {
      // The k largest of log(weight) + Gumbel noise are k draws without replacement.
      const double uniform = (static_cast<double>(own() >> 11) + 0.5) * 0x1.0p-53;
      const double weight = -given.exponent * std::log(static_cast<double>(i + 1));
      key[row * experts + order[i]] = static_cast<float>(weight - std::log(-std::log(uniform)));
    }
  return std::get<1>(at::topk(keys, k, -1));
}

}  // namespace

std::optional<at::Tensor> drawn_choices(const at::Tensor& scores, int64_t k, int64_t dim) {
  const auto given = routing();
  if (!given || !at::isFloatingType(scores.scalar_type()) || scores.dim() == 0) return {};
  const int64_t experts = scores.size(dim), rows = experts == 0 ? 0 : scores.numel() / experts;
  const int npu = settings().devices[static_cast<std::size_t>(Stream::of_this_thread()->device().index())];
  static std::mutex mutex;
  static auto* known = new std::map<std::tuple<int, int64_t, int64_t, int64_t>, at::Tensor>;
  const std::scoped_lock lock(mutex);
  at::Tensor& choices = (*known)[{npu, rows, experts, k}];
  if (!choices.defined()) choices = draw(*given, npu, rows, experts, k);
  auto sizes = scores.movedim(dim, -1).sizes().vec();
  sizes.back() = k;
  return choices.view(sizes).movedim(-1, dim);
}

}  // namespace sim
