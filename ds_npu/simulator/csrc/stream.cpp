#include "stream.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <pthread.h>

#include "acl/acl_base.h"
#include "acl/error_codes/rt_error_codes.h"
#include "api.h"

namespace sim {
namespace {

// Codes with which CANN reports a task that failed and a wait that took too long.
constexpr int kTaskFailed = ACL_ERROR_RT_AICORE_EXCEPTION;
constexpr int kTimedOut = ACL_ERROR_RT_STREAM_SYNC_TIMEOUT;

int next_id() {
  static std::atomic<int> streams{0};
  return streams++;
}

// Waits for `condition`; false when `timeout` passed first.
template <class Condition>
bool wait_for(std::condition_variable& variable, std::unique_lock<std::mutex>& lock, Timeout timeout, Condition condition) {
  if (timeout) return variable.wait_for(lock, *timeout, condition);
  variable.wait(lock, condition);
  return true;
}

}  // namespace

Stream::Stream(Device& device) : device_(device), id_(next_id()), chaos_(id_) {
  device_.add(this);
  worker_ = std::thread([this] { run(); });
  pthread_setname_np(worker_.native_handle(), ("npu" + std::to_string(device.index()) + "/" + std::to_string(id_)).c_str());
}

Stream::~Stream() {
  {
    const std::scoped_lock lock(mutex_);
    closing_ = true;
  }
  arrived_.notify_all();
  worker_.join();
  device_.remove(this);
}

void Stream::push(const char* name, std::function<void()> work) { enqueue({name, std::move(work), false}); }

void Stream::enqueue(Task task) {
  bool asleep;
  {
    const std::scoped_lock lock(mutex_);
    asleep = queue_.empty() && !busy_;
    queue_.push_back(std::move(task));
  }
  if (asleep) arrived_.notify_one();
}

void Stream::run() {
  // The operators' arithmetic is ATen's on CPU tensors, with nothing recorded for a backward pass.
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  std::unique_lock lock(mutex_);
  while (true) {
    arrived_.wait(lock, [this] { return closing_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Task task = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    perform(task);
    task.work = nullptr;
    done_.fetch_add(1, std::memory_order_relaxed);
    lock.lock();
    busy_ = false;
  }
}

void Stream::perform(Task& task) {
  if (device_.failed() && !task.always) return;
  chaos_.maybe_hold(*this);
  try {
    task.work();
  } catch (const Failure& failure) {
    device_.fail(failure.code(), std::string(task.name) + ": " + failure.what());
  } catch (const std::exception& error) {
    device_.fail(kTaskFailed, std::string(task.name) + ": " + error.what());
  }
}

void Stream::synchronize(Timeout timeout) {
  const auto marker = std::make_shared<Event>();
  Event::record(marker, *this);
  marker->synchronize(timeout);
}

bool Stream::idle() {
  const std::scoped_lock lock(mutex_);
  return queue_.empty() && !busy_;
}

void Event::record(const std::shared_ptr<Event>& event, Stream& stream) {
  std::uint64_t ticket;
  {
    const std::scoped_lock lock(event->mutex_);
    ticket = ++event->recorded_;
    event->device_ = &stream.device();
  }
  stream.enqueue({"record event",
                  [event, ticket] {
                    const std::scoped_lock lock(event->mutex_);
                    event->completed_ = std::max(event->completed_, ticket);
                    event->time_ = Clock::now();
                    event->reached_.notify_all();
                  },
                  true});
}

void Event::wait(const std::shared_ptr<Event>& event, Stream& stream) {
  std::uint64_t ticket;
  {
    const std::scoped_lock lock(event->mutex_);
    ticket = event->recorded_;
  }
  stream.enqueue({"wait for event", [event, ticket] { event->await(ticket, {}); }, true});
}

void Event::await(std::uint64_t ticket, Timeout timeout) {
  std::unique_lock lock(mutex_);
  if (!wait_for(reached_, lock, timeout, [&] { return completed_ >= ticket; }))
    throw Failure(kTimedOut, "the stream was not done after " + std::to_string(timeout->count()) + " ms");
}

bool Event::complete() {
  const std::scoped_lock lock(mutex_);
  return completed_ >= recorded_;
}

void Event::synchronize(Timeout timeout) {
  std::uint64_t ticket;
  {
    const std::scoped_lock lock(mutex_);
    ticket = recorded_;
  }
  await(ticket, timeout);
  throw_if_failed();
}

void Event::throw_if_failed() {
  std::unique_lock lock(mutex_);
  Device* device = device_;
  lock.unlock();
  if (device != nullptr) device->throw_if_failed();
}

Clock::time_point Event::time() {
  const std::scoped_lock lock(mutex_);
  return time_;
}

Stream& stream_of(void* handle) {
  return handle == nullptr ? current_device().default_stream() : *static_cast<Stream*>(handle);
}

}  // namespace sim
