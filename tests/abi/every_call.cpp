// The header from C++17: it compiles as it is, and the calls work from several threads at once.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <tiermgr.h>
#include <vector>

static_assert(TIERMGR_OK == 0 && TIERMGR_E_NO_DAEMON == -32);

namespace {

void check(tiermgr_status status, const char *what) {
    if (status != TIERMGR_OK)
        throw std::runtime_error(std::string(what) + ": " + tiermgr_status_name(status) + ": " +
                                 tiermgr_last_error());
}

struct Disconnect {
    void operator()(tiermgr_client *client) const { tiermgr_disconnect(client); }
};
using Client = std::unique_ptr<tiermgr_client, Disconnect>;

// What std::vector needs, so that C++ containers live in managed memory.
template <typename T> struct Managed {
    using value_type = T;
    tiermgr_client *client;

    explicit Managed(tiermgr_client *of) : client(of) {}
    template <typename U> Managed(const Managed<U> &other) : client(other.client) {}

    T *allocate(std::size_t count) {
        void *address = nullptr;
        check(tiermgr_alloc(client, count * sizeof(T), alignof(T), &address), "tiermgr_alloc");
        return static_cast<T *>(address);
    }
    void deallocate(T *address, std::size_t) { tiermgr_free(client, address); }
    template <typename U> bool operator==(const Managed<U> &other) const {
        return client == other.client;
    }
    template <typename U> bool operator!=(const Managed<U> &other) const {
        return client != other.client;
    }
};

void work(tiermgr_client *client, std::size_t bytes, std::uint64_t seed) {
    std::vector<std::uint64_t, Managed<std::uint64_t>> words{Managed<std::uint64_t>(client)};
    while (words.size() < bytes / 16)
        words.push_back((words.size() + 1) * 0x9e3779b97f4a7c15u + seed);
    std::sort(words.begin(), words.end());
    if (!std::is_sorted(words.begin(), words.end()))
        throw std::runtime_error("sorted words are not in order");
    std::uint64_t sum = 0, wanted = 0;
    for (std::size_t i = 0; i < words.size(); i++) {
        sum += words[i];
        wanted += (i + 1) * 0x9e3779b97f4a7c15u + seed;
    }
    if (sum != wanted)
        throw std::runtime_error("sorting changed the words");
}

} // namespace

int main() try {
    const char *size = std::getenv("SIZE");
    std::size_t bytes = size ? std::strtoull(size, nullptr, 10) : std::size_t(256) << 20;
    tiermgr_client_options options{};
    options.size = sizeof options;
    options.name = "every_call.cpp";
    tiermgr_client *raw = nullptr;
    check(tiermgr_connect(&options, &raw), "tiermgr_connect");
    Client client(raw);

    constexpr std::size_t threads = 4;
    std::vector<std::string> failures(threads);
    std::vector<std::thread> running;
    for (std::size_t i = 0; i < threads; i++)
        running.emplace_back([&, i] {
            try {
                work(client.get(), bytes / threads, i);
            } catch (const std::exception &error) {
                failures[i] = error.what();
            }
        });
    for (auto &thread : running)
        thread.join();
    for (const auto &failure : failures)
        if (!failure.empty())
            throw std::runtime_error(failure);

    tiermgr_statistics statistics{};
    statistics.size = sizeof statistics;
    check(tiermgr_statistics_query(client.get(), &statistics), "tiermgr_statistics_query");
    if (statistics.poisoned_pages != 0)
        throw std::runtime_error("pages were lost");
    std::printf("ok every_call.cpp: %zu threads, %llu faults\n", threads,
                static_cast<unsigned long long>(statistics.faults));
    return 0;
} catch (const std::exception &error) {
    std::fprintf(stderr, "FAILED: %s\n", error.what());
    return 1;
}
