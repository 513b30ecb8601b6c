#include "stream.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <utility>

#include "acl/acl_base.h"
#include "acl/error_codes/rt_error_codes.h"
#include "chaos.h"
#include "failure.h"
#include "known_bytes.h"
#include "python_stack.h"
#include "settings.h"
#include "trace.h"

namespace sim {
namespace {

// Codes with which CANN reports a task that failed and a wait that took too long.
constexpr int kTaskFailed = ACL_ERROR_RT_AICORE_EXCEPTION;
constexpr int kTimedOut = ACL_ERROR_RT_STREAM_SYNC_TIMEOUT;

thread_local Stream* of_thread = nullptr;

constexpr int kPolls = 100;  // a host that has asked so often and dispatched nothing meanwhile asks in a loop: it waits

int next_id() {
  static std::atomic<int> streams{kHostTrack};
  return ++streams;
}

std::atomic<std::uint64_t> tasks{0};
std::atomic<std::uint64_t> moments{0};

// Waits for `condition`; false when `timeout` passed first.
template <class Condition>
bool wait_for(std::condition_variable& variable, std::unique_lock<std::mutex>& lock, Timeout timeout, Condition condition) {
  if (timeout) return variable.wait_for(lock, *timeout, condition);
  variable.wait(lock, condition);
  return true;
}

// The foreign tasks for which the host has waited.
class Covered {
 public:
  void add(const Foreign& foreign) {
    const std::scoped_lock lock(mutex_);
    covered_.join(foreign);
  }
  bool has(const Foreign& foreign) {
    const std::scoped_lock lock(mutex_);
    return foreign.within(covered_);
  }

 private:
  std::mutex mutex_;
  Foreign covered_;
};

Covered& covered() {
  static auto* one = new Covered;
  return *one;
}

// Whether this thread asks in a loop: many times in a row, without a dispatch between.
bool asks_in_a_loop() {
  thread_local std::uint64_t dispatched = 0;
  thread_local int asked = 0;
  if (std::exchange(dispatched, host().dispatched()) != dispatched) asked = 0;
  return ++asked > kPolls;
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

void Stream::push(Task task) {
  bool asleep;
  {
    std::unique_lock lock(mutex_);
    const Nanoseconds room = await_room(lock);
    asleep = queue_.empty() && !busy_;
    if (task.is_foreign) foreign_.add(id_);
    task.foreign = foreign_;
    task.launched = host().launch(task.dispatch, room);
    task.place = ++tasks;
    if (settings().races && !task.account.touches.empty()) task.stack = python_stack();
    queue_.push_back(std::move(task));
  }
  if (device_.chaos() != nullptr) device_.chaos()->enqueued();
  if (asleep) arrived_.notify_one();
}

// Returns when the task ended whose place is now free, which the host knows from then on; 0 where one was still free.
Nanoseconds Stream::await_room(std::unique_lock<std::mutex>& lock) {
  if (device_.chaos() != nullptr) return 0;
  if (free_ > 0) {
    --free_;
    return 0;
  }
  room_.wait(lock, [this] { return !ended_.empty(); });
  const auto [time, foreign] = std::move(ended_.front());
  ended_.pop_front();
  covered().add(foreign);
  return time;
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
    busy_ = !task.marks_end;
    lock.unlock();
    perform(task);
    Foreign foreign = std::move(task.foreign);
    task = {};
    lock.lock();
    busy_ = false;
    if (chaos == nullptr) {
      ended_.push_back({end(), std::move(foreign)});
      room_.notify_one();
    }
    if (chaos != nullptr) {
      lock.unlock();
      chaos->end_turn();
      lock.lock();
    }
  }
}

void Stream::perform(Task& task) {
  if (device_.failed() && !task.always) return;
  begun_ = std::max(end(), task.launched);
  duration_ = nanoseconds(task.account.seconds);
  const Nanoseconds ready = begun_;
  const auto done = [&] {
    if (!tracing()) return;
    trace({.device = device_.index(),
           .stream = id_,
           .place = task.place,
           .name = task.name,
           .detail = task.detail,
           .account = task.account,
           .stack = task.stack,
           .dispatch = task.dispatch,
           .begun = begun_,
           .ended = end(),
           .ready = ready});
  };
  const auto attempt = [&](const auto& part) {
    try {
      part();
    } catch (const Failure& failure) {
      device_.fail(failure.code(), std::string(task.name) + ": " + failure.what());
    } catch (const c10::Error& error) {
      device_.fail(kTaskFailed, std::string(task.name) + ": " + error.what_without_backtrace());
    } catch (const std::exception& error) {
      device_.fail(kTaskFailed, std::string(task.name) + ": " + error.what());
    }
  };
  // Write the trace line before the waiting host goes on: the process may end right after. A host waits for such a task
  // until it has run, so it runs where the line could not be written, too.
  if (task.marks_end) attempt(done);
  attempt([&] {
    const bool known = !dry_run() || !task.computes || computes(task.account);
    if (known) task.work();
    if (dry_run() && task.computes) conclude(task.account, known);
    if (!known && task.unknown) task.unknown();
    if (!task.marks_end) done();
  });
}

void Stream::synchronize(Timeout timeout) { Moment::recorded_on(*this)->synchronize(timeout); }

bool Stream::query() {
  if (device_.chaos() == nullptr && keeps_host_time()) return Moment::recorded_on(*this)->query();
  const std::scoped_lock lock(mutex_);
  return queue_.empty() && !busy_;
}

Moment::Moment(Stream& stream) : device_(stream.device()), number_(++moments), foreign_(stream.foreign_) {}

std::string Moment::detail() const { return tracing() ? "event " + std::to_string(number_) : ""; }

std::shared_ptr<Moment> Moment::recorded_on(Stream& stream, Dispatch dispatch) {
  std::shared_ptr<Moment> moment;
  {
    const std::scoped_lock lock(stream.mutex_);
    moment.reset(new Moment(stream));
  }
  stream.push({.name = "record event",
               .work = [moment] { moment->reach(); },
               .detail = moment->detail(),
               .dispatch = dispatch,
               .always = true,
               .marks_end = true});
  return moment;
}

void Moment::wait(const std::shared_ptr<Moment>& moment, Stream& stream) {
  {
    const std::scoped_lock lock(stream.mutex_);
    stream.foreign_.join(moment->foreign_);
  }
  stream.push({.name = "wait for event",
               .work = [moment] { moment->await(); },
               .detail = moment->detail(),
               .dispatch = Dispatch::kEvent,
               .always = true,
               .ready = [moment] { return moment->reached(); }});
}

void Moment::reach() {
  const std::scoped_lock lock(mutex_);
  reached_ = true;
  time_ = of_thread->end();
  end_host_waits();
  changed_.notify_all();
}

bool Moment::reached() {
  const std::scoped_lock lock(mutex_);
  return reached_;
}

void Moment::await_reached() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return reached_; });
}

void Moment::await() {
  await_reached();
  of_thread->begin_at(time_);
}

// The thread that reaches the moment tells Chaos, so that the device stops right there.
void Moment::end_host_waits() {
  for (; host_waits_ > 0; --host_waits_) device_.chaos()->host_goes_on();
}

void Moment::synchronize(Timeout timeout) {
  std::unique_lock lock(mutex_);
  if (!reached_ && device_.chaos() != nullptr) {
    ++host_waits_;
    device_.chaos()->host_waits();
  }
  const bool in_time = wait_for(changed_, lock, timeout, [this] { return reached_; });
  end_host_waits();
  lock.unlock();
  if (!in_time) throw Failure(kTimedOut, "the device was not done after " + std::to_string(timeout->count()) + " ms");
  device_.throw_if_failed();
  if (keeps_host_time()) seen("host wait", host().now());
}

// The host has learned that the moment is reached.
void Moment::seen(const char* name, Nanoseconds begun) {
  host().wait(time_);
  covered().add(foreign_);
  if (!tracing()) return;
  trace({.device = device_.index(),
         .stream = kHostTrack,
         .place = ++tasks,
         .name = name,
         .detail = detail(),
         .account = {},
         .stack = {},
         .dispatch = Dispatch::kNone,
         .begun = begun,
         .ended = host().now()});
}

bool Moment::query() {
  if (device_.chaos() != nullptr || !keeps_host_time()) return reached();
  const bool is_known = covered().has(foreign_), loops = asks_in_a_loop();
  if (is_known) await_reached();
  if (loops ? !reached() : !is_known || time() > host().now()) return false;
  seen("host query", host().now());
  return true;
}

Nanoseconds Moment::time() {
  const std::scoped_lock lock(mutex_);
  return time_;
}

void Event::record(Stream& stream) {
  auto moment = Moment::recorded_on(stream, Dispatch::kEvent);
  const std::scoped_lock lock(mutex_);
  last_ = std::move(moment);
}

std::shared_ptr<Moment> Event::last() {
  const std::scoped_lock lock(mutex_);
  return last_;
}

void on_host(const char* name, const Account& account) {
  if (!keeps_host_time()) return;
  const Nanoseconds begun = host().now();
  host().spend(nanoseconds(account.seconds));
  if (!tracing()) return;
  trace({.device = device_or_first().index(),
         .stream = kHostTrack,
         .place = ++tasks,
         .name = name,
         .detail = {},
         .account = account,
         .stack = settings().races ? python_stack() : "",
         .dispatch = Dispatch::kNone,
         .begun = begun,
         .ended = host().now()});
}

Stream& stream_of(void* handle) {
  return handle == nullptr ? current_device().default_stream() : *static_cast<Stream*>(handle);
}

}  // namespace sim
