#include "stream.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <pthread.h>

#include "acl/acl_base.h"
#include "acl/error_codes/rt_error_codes.h"
#include "api.h"
#include "chaos.h"

namespace sim {
namespace {

// Codes with which CANN reports a task that failed and a wait that took too long.
constexpr int kTaskFailed = ACL_ERROR_RT_AICORE_EXCEPTION;
constexpr int kTimedOut = ACL_ERROR_RT_STREAM_SYNC_TIMEOUT;

thread_local Stream* of_thread = nullptr;

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

Stream::Stream(Device& device) : device_(device), id_(next_id()) {
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
  if (device_.chaos() != nullptr) device_.chaos()->enqueued();
  if (asleep) arrived_.notify_one();
}

Stream* Stream::of_this_thread() { return of_thread; }

bool Stream::next_is_ready() {
  const std::scoped_lock lock(mutex_);
  if (busy_ || queue_.empty()) return resuming_;
  return !queue_.front().ready || queue_.front().ready();
}

void Stream::run() {
  of_thread = this;
  // The operators' arithmetic is ATen's on CPU tensors, with nothing recorded for a backward pass.
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  Chaos* const chaos = device_.chaos();
  std::unique_lock lock(mutex_);
  while (true) {
    arrived_.wait(lock, [this] { return closing_ || !queue_.empty(); });
    if (queue_.empty()) return;
    if (chaos != nullptr) {
      lock.unlock();
      chaos->begin_turn(*this);
      lock.lock();
    }
    Task task = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    perform(task);
    task = {};
    lock.lock();
    busy_ = false;
    if (chaos != nullptr) {
      lock.unlock();
      chaos->end_turn();
      lock.lock();
    }
  }
}

void Stream::perform(Task& task) {
  if (device_.failed() && !task.always) return;
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
  stream.enqueue({"record event", [event, ticket] { event->reach(ticket); }, true});
}

void Event::reach(std::uint64_t ticket) {
  const std::scoped_lock lock(mutex_);
  completed_ = std::max(completed_, ticket);
  time_ = Clock::now();
  end_host_waits(completed_);
  reached_.notify_all();
}

void Event::wait(const std::shared_ptr<Event>& event, Stream& stream) {
  std::uint64_t ticket;
  {
    const std::scoped_lock lock(event->mutex_);
    ticket = event->recorded_;
  }
  stream.enqueue({"wait for event", [event, ticket] { event->await(ticket); }, true,
                  [event, ticket] { return event->reached(ticket); }});
}

bool Event::reached(std::uint64_t ticket) {
  const std::scoped_lock lock(mutex_);
  return completed_ >= ticket;
}

void Event::await(std::uint64_t ticket) {
  std::unique_lock lock(mutex_);
  reached_.wait(lock, [&] { return completed_ >= ticket; });
}

// The device is told by whoever reaches the event, so that under chaos it stops right there.
void Event::end_host_waits(std::uint64_t up_to) {
  const auto ended = std::erase_if(host_waits_, [&](std::uint64_t ticket) { return ticket <= up_to; });
  for (std::size_t i = 0; i < ended && device_->chaos() != nullptr; ++i) device_->chaos()->host_goes_on();
}

bool Event::complete() {
  const std::scoped_lock lock(mutex_);
  return completed_ >= recorded_;
}

void Event::synchronize(Timeout timeout) {
  std::unique_lock lock(mutex_);
  const std::uint64_t ticket = recorded_;
  if (completed_ < ticket) {
    host_waits_.push_back(ticket);
    if (device_->chaos() != nullptr) device_->chaos()->host_waits();
  }
  const bool in_time = wait_for(reached_, lock, timeout, [&] { return completed_ >= ticket; });
  if (!in_time) end_host_waits(ticket);
  lock.unlock();
  if (!in_time) throw Failure(kTimedOut, "the device was not done after " + std::to_string(timeout->count()) + " ms");
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
