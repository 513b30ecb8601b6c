#include "hccl/segment.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>

#include "failure.h"

namespace sim::hccl {

struct Segment::Header {
  std::uint64_t nonce[2];
  std::atomic<std::uint32_t> ranks;
  std::atomic<std::uint32_t> generation;
  std::atomic<std::uint32_t> sleepers;  // too high after a sleeper was killed, which costs a needless system call
  std::atomic<std::uint32_t> failing;
  std::atomic<std::uint32_t> failed;
  char failure[kTextBytes];
};

namespace {

constexpr char kMagic[8] = "ds_npu1";
constexpr std::size_t kLine = 64;

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "atomics are shared between processes");

constexpr std::size_t aligned(std::size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// Per rank: its slot, three counts for each peer, and the channels to each peer.
std::size_t bytes_per_rank(std::uint32_t ranks) {
  return aligned(sizeof(Slot)) + aligned(3 * ranks * sizeof(std::uint64_t)) + ranks * aligned(sizeof(Channel));
}

[[noreturn]] void system_failure(const char* what) {
  throw Failure(HCCL_E_SYSCALL, std::string("the communicator's shared memory: ") + what + ": " + std::strerror(errno));
}

struct File {
  int descriptor;
  ~File() { close(descriptor); }
};

}  // namespace

Mapping::Mapping(int file, std::size_t bytes) : bytes_(bytes) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  if (address == MAP_FAILED) system_failure("mmap");
  base_ = static_cast<char*>(address);
}

Mapping::~Mapping() {
  if (base_ != nullptr) munmap(base_, bytes_);
}

Mapping::Mapping(Mapping&& other) noexcept { *this = std::move(other); }

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Address Segment::create() {
  const int file = memfd_create("ds_npu_communicator", MFD_CLOEXEC);
  if (file < 0) system_failure("memfd_create");
  if (ftruncate(file, sizeof(Header)) != 0) system_failure("ftruncate");
  Address address{};
  std::ranges::copy(kMagic, address.magic);
  address.pid = getpid();
  address.file = file;
  if (getrandom(address.nonce, sizeof address.nonce, 0) != sizeof address.nonce) system_failure("getrandom");
  std::memcpy(Mapping(file, sizeof(Header)).base(), address.nonce, sizeof address.nonce);
  return address;
}

void Segment::release(const Address& address) {
  if (address.pid == getpid()) close(address.file);
}

Segment::Segment(const Address& address, std::uint32_t ranks) : ranks_(ranks) {
  if (!std::ranges::equal(address.magic, kMagic))
    throw Failure(HCCL_E_PARA, "this root info is none that HcclGetRootInfo of the simulated NPUs has made");
  const File file{open_file_of(address.pid, address.file)};
  struct stat found {};
  if (fstat(file.descriptor, &found) != 0) system_failure("fstat");
  if (static_cast<std::size_t>(found.st_size) < sizeof(Header))
    throw Failure(HCCL_E_REMOTE, "the process that made this root info has ended");
  mapping_ = Mapping(file.descriptor, sizeof(Header));
  if (!std::ranges::equal(header().nonce, address.nonce))
    throw Failure(HCCL_E_REMOTE, "the process that made this root info has ended, or closed it: it serves one communicator");
  std::uint32_t agreed = 0;
  if (!header().ranks.compare_exchange_strong(agreed, ranks) && agreed != ranks) {
    const std::string why = "one rank joins a communicator of " + std::to_string(ranks) + " ranks, others one of " +
                            std::to_string(agreed);
    fail_all(why);
    throw Failure(HCCL_E_PARA, why);
  }
  const std::size_t bytes = aligned(sizeof(Header)) + ranks * bytes_per_rank(ranks);
  if (ftruncate(file.descriptor, static_cast<off_t>(bytes)) != 0) system_failure("ftruncate");
  mapping_ = Mapping(file.descriptor, bytes);
}

Slot& Segment::slot(std::uint32_t rank) const {
  return *reinterpret_cast<Slot*>(mapping_.base() + aligned(sizeof(Header)) + rank * bytes_per_rank(ranks_));
}

std::uint64_t* Segment::counts(std::uint32_t rank) const {
  return reinterpret_cast<std::uint64_t*>(reinterpret_cast<char*>(&slot(rank)) + aligned(sizeof(Slot)));
}

std::uint64_t* Segment::send_counts(std::uint32_t rank) const { return counts(rank); }
std::uint64_t* Segment::send_displacements(std::uint32_t rank) const { return counts(rank) + ranks_; }
std::uint64_t* Segment::receive_counts(std::uint32_t rank) const { return counts(rank) + 2 * ranks_; }

Channel& Segment::channel(std::uint32_t source, std::uint32_t target) const {
  char* first = reinterpret_cast<char*>(counts(source)) + aligned(3 * ranks_ * sizeof(std::uint64_t));
  return *reinterpret_cast<Channel*>(first + target * aligned(sizeof(Channel)));
}

void Segment::fail_all(std::string_view why) {
  if (header().failing.exchange(1) != 0) return;
  why.copy(header().failure, kTextBytes - 1);
  header().failed.store(1);
  announce();
}

std::string Segment::failure() const {
  return header().failed.load() != 0 ? header().failure : "";
}

std::uint32_t Segment::generation() const { return header().generation.load(); }

void Segment::announce() {
  header().generation.fetch_add(1);
  if (header().sleepers.load() != 0) syscall(SYS_futex, &header().generation, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Segment::sleep(std::uint32_t generation, std::chrono::milliseconds longest) const {
  const timespec timeout{longest.count() / 1000, static_cast<long>(longest.count() % 1000 * 1000000)};
  header().sleepers.fetch_add(1);
  syscall(SYS_futex, &header().generation, FUTEX_WAIT, generation, &timeout, nullptr, 0);
  header().sleepers.fetch_sub(1);
}

}  // namespace sim::hccl
