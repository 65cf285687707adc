#include "h3/mailbox.hpp"

#include <stdexcept>

#include "mailbox_layout.hpp"
#include "mailbox_wait.hpp"

namespace h3 {

using namespace mailbox;

MailboxWorker::MailboxWorker(const Mailbox& mailbox, Member member, std::uint64_t spin_ns)
    : mailbox_(mailbox), member_(member), spin_ns_(spin_ns) {
  if (member.id >= mailbox.geometry().workers) throw std::invalid_argument("the mailbox has no such worker");
}

// Copies the request of an entry that was just taken. One whose bytes are not what its caller wrote is given up.
MailboxResult MailboxWorker::read_request(Word taken, MailboxRequest& request) const {
  Entry& entry = mailbox_.entry(taken.sequence());
  const std::uint32_t size = entry.request_bytes.load(std::memory_order_relaxed);
  const std::uint32_t crc = entry.request_crc.load(std::memory_order_relaxed);
  const bool is_whole = size <= mailbox_.geometry_.request_bytes &&
                        load_message(mailbox_.request_of(taken.sequence()), taken.sequence(), size, crc, request.bytes);
  if (!is_whole) {
    if (mailbox_.move(entry, taken, taken.as(State::kFailed))) mailbox_.announce_ended(taken.caller());
    else mailbox_.move(entry, taken.as(State::kAbandoned), taken.free());
    return MailboxResult::kGone;
  }
  request.ticket = taken.sequence();
  request.deadline_ns = entry.deadline_ns.load(std::memory_order_relaxed);
  request.word = taken.bits();
  return MailboxResult::kOk;
}

// kTimeout: there is none.
MailboxResult MailboxWorker::take_oldest(MailboxRequest& request) {
  for (;;) {
    bool is_found = false;
    Word oldest(0);
    for (std::uint32_t i = 0; i < mailbox_.geometry_.entries; ++i) {
      const Word word(mailbox_.entry(i).word.load(std::memory_order_relaxed));
      if (!word.is(State::kPosted) || (is_found && !is_older(word.sequence(), oldest.sequence()))) continue;
      oldest = word;
      is_found = true;
    }
    if (!is_found) return mailbox_.is_worker(member_) ? MailboxResult::kTimeout : MailboxResult::kBuried;
    const Word taken = oldest.taken_by(member_.id);
    Entry& entry = mailbox_.entry(oldest.sequence());
    if (!mailbox_.move(entry, oldest, taken)) continue;
    // A burial that began after this look finds the entry; for one before, we put it back ourselves.
    if (!mailbox_.is_worker(member_)) {
      if (mailbox_.move(entry, taken, oldest)) mailbox_.announce_posted(1);
      else mailbox_.move(entry, taken.as(State::kAbandoned), taken.free());
      return MailboxResult::kBuried;
    }
    if (read_request(taken, request) == MailboxResult::kOk) return MailboxResult::kOk;
  }
}

// The bit first, then a last look at the signal: a caller changes the signal, then looks at the bits.
void MailboxWorker::sleep(std::uint32_t signal, std::uint64_t deadline_ns) const {
  Header& header = mailbox_.header();
  const std::uint64_t bit = std::uint64_t{1} << member_.id;
  header.idle.fetch_or(bit);
  if (header.signal.load() == signal) futex_sleep(header.signal, signal, deadline_ns);
  header.idle.fetch_and(~bit);
}

MailboxResult MailboxWorker::take(MailboxRequest& request, std::uint64_t deadline_ns) {
  const Header& header = mailbox_.header();
  for (;;) {
    const std::uint32_t signal = header.signal.load();
    const MailboxResult result = take_oldest(request);
    if (result != MailboxResult::kTimeout || now_ns() >= deadline_ns) return result;
    const bool is_posted = spin(spin_ns_, deadline_ns, [&] { return header.signal.load() != signal; });
    if (!is_posted) sleep(signal, deadline_ns);
  }
}

MailboxResult MailboxWorker::reply(const MailboxRequest& request, std::span<const char> bytes) {
  const Word taken(request.word);
  Entry& entry = mailbox_.entry(taken.sequence());
  if (entry.word.load() == taken.bits()) {
    const std::uint32_t crc = store_message(mailbox_.reply_of(taken.sequence()), taken.bits(), bytes, scratch_);
    entry.reply_bytes.store(static_cast<std::uint32_t>(bytes.size()), std::memory_order_relaxed);
    entry.reply_crc.store(crc, std::memory_order_relaxed);
    if (mailbox_.move(entry, taken, taken.as(State::kDone))) {
      mailbox_.announce_ended(taken.caller());
      return MailboxResult::kOk;
    }
  }
  mailbox_.move(entry, taken.as(State::kAbandoned), taken.free());
  return mailbox_.is_worker(member_) ? MailboxResult::kGone : MailboxResult::kBuried;
}

}  // namespace h3
