// Client::UploadAdapter against a server in this process.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "server/base/sha256.h"
#include "tests/unit/client/fake_server.h"

namespace h3::client {
namespace {

namespace fs = std::filesystem;
using ::h3::testing::FakeServer;
using ::h3::testing::UploadReader;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

class UploadTest : public ::testing::Test {
 protected:
  UploadTest() {
    std::string pattern = (fs::temp_directory_path() / "h3-upload-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
  }
  ~UploadTest() override { fs::remove_all(folder_); }

  // A file of `size` bytes that differ from place to place.
  std::string MakeFile(size_t size) {
    bytes_.resize(size);
    for (size_t i = 0; i < size; ++i) bytes_[i] = static_cast<char>(i * 31 + i / 4096);
    const std::string path = (folder_ / "style.safetensors").string();
    std::ofstream(path, std::ios::binary) << bytes_;
    return path;
  }

  fs::path folder_;
  std::string bytes_;  // Of the last file.
};

TEST_F(UploadTest, SendsAHeaderThenAllBytesInOrderInChunksOfAtMostOneMiB) {
  FakeServer server;
  v1::UploadHeader header;
  std::string received;
  std::vector<size_t> chunks;
  server.on_upload = [&](grpc::ServerContext&, UploadReader& reader, v1::UploadAdapterResponse& response) {
    v1::UploadAdapterRequest request;
    reader.Read(&request);
    header = request.header();
    while (reader.Read(&request)) {
      chunks.push_back(request.chunk().size());
      received += request.chunk();
    }
    response.set_replaced("before");
    return absl::OkStatus();
  };
  const std::string path = MakeFile((5 << 19) + 3);  // Two chunks and a half.
  std::vector<uint64_t> hashed, sent;
  const auto response = server.Connect()->UploadAdapter("style/v2", path,
                                                        {.events = {.hashed =
                                                                        [&](uint64_t bytes, uint64_t total) {
                                                                          EXPECT_EQ(total, bytes_.size());
                                                                          EXPECT_TRUE(sent.empty());
                                                                          hashed.push_back(bytes);
                                                                        },
                                                                    .sent =
                                                                        [&](uint64_t bytes, uint64_t total) {
                                                                          EXPECT_EQ(total, bytes_.size());
                                                                          sent.push_back(bytes);
                                                                        }}});
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_EQ(response->replaced(), "before");
  EXPECT_EQ(header.name(), "style/v2");
  EXPECT_EQ(header.bytes(), bytes_.size());
  EXPECT_EQ(header.digest(), Sha256Hex(bytes_));
  EXPECT_FALSE(header.check_only());
  EXPECT_THAT(chunks, ElementsAre(1 << 20, 1 << 20, (1 << 19) + 3));
  EXPECT_EQ(received, bytes_);
  EXPECT_EQ(sent, (std::vector<uint64_t>{1 << 20, 2 << 20, bytes_.size()}));
  EXPECT_EQ(hashed, sent);
}

TEST_F(UploadTest, AnEmptyFileAndACheckTravelToo) {
  FakeServer server;
  v1::UploadHeader header;
  server.on_upload = [&](grpc::ServerContext&, UploadReader& reader, v1::UploadAdapterResponse&) {
    v1::UploadAdapterRequest request;
    reader.Read(&request);
    header = request.header();
    EXPECT_FALSE(reader.Read(&request));
    return absl::OkStatus();
  };
  const auto response = server.Connect()->UploadAdapter("", MakeFile(0), {.check_only = true});
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_TRUE(header.check_only());
  EXPECT_EQ(header.bytes(), 0u);
  EXPECT_EQ(header.digest(), Sha256Hex(""));
}

// Over a socket: there a server's early end comes as a reset of the stream while the client still writes.
TEST_F(UploadTest, AnEarlyRefusalEndsItWithItsReason) {
  const std::string socket = absl::StrCat("unix:", (folder_ / "h3.sock").string());
  for (const std::string& listen : {std::string(), socket}) {
    FakeServer server(listen);
    server.on_upload = [](grpc::ServerContext&, UploadReader& reader, v1::UploadAdapterResponse&) {
      v1::UploadAdapterRequest request;
      reader.Read(&request);
      return Refuse(absl::StatusCode::kResourceExhausted, "DISK_FULL", "no room for 64 MiB", {{"bytes", "67108864"}});
    };
    const std::string path = MakeFile(64 << 20);  // More than any window: the client must notice that nobody reads.
    uint64_t sent = 0;
    const auto client = listen.empty() ? server.Connect() : std::make_unique<Client>(listen);
    const auto response =
        client->UploadAdapter("style", path, {.events = {.sent = [&](uint64_t bytes, uint64_t) { sent = bytes; }}});
    EXPECT_EQ(response.status().code(), absl::StatusCode::kResourceExhausted) << response.status();
    EXPECT_EQ(ReasonOf(response.status()), "DISK_FULL");
    EXPECT_THAT(DetailsOf(response.status()), ElementsAre(Pair("bytes", "67108864")));
    EXPECT_LT(sent, bytes_.size());
  }
}

TEST_F(UploadTest, CancelFromAnotherThreadEndsItOnBothSides) {
  FakeServer server;
  absl::Notification receiving, gone;
  server.on_upload = [&](grpc::ServerContext& context, UploadReader& reader, v1::UploadAdapterResponse&) {
    v1::UploadAdapterRequest request;
    reader.Read(&request);
    receiving.Notify();
    gone.WaitForNotificationWithTimeout(absl::Seconds(10));  // Reads nothing, so the client is still sending.
    while (reader.Read(&request)) {
    }
    EXPECT_TRUE(context.IsCancelled());
    return absl::CancelledError("client gone");
  };
  const std::string path = MakeFile(64 << 20);
  Canceller canceller;
  std::thread interrupter([&] {
    receiving.WaitForNotification();
    canceller.Cancel();
    gone.Notify();
  });
  const auto response = server.Connect()->UploadAdapter("style", path, {}, {.cancel = &canceller});
  interrupter.join();
  EXPECT_EQ(response.status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(ReasonOf(response.status()), "CANCELLED");
}

TEST_F(UploadTest, CancelWhileHashingSendsNothing) {
  FakeServer server;  // Any call would be UNIMPLEMENTED.
  Canceller canceller;
  const auto response = server.Connect()->UploadAdapter("style", MakeFile(3 << 20),
                                                        {.events = {.hashed = [&](uint64_t, uint64_t) { canceller.Cancel(); }}},
                                                        {.cancel = &canceller});
  EXPECT_EQ(ReasonOf(response.status()), "CANCELLED") << response.status();
}

TEST_F(UploadTest, AFileThatShrinksWhileItIsSentIsNotSentToTheEnd) {
  FakeServer server;
  absl::Notification gone;
  server.on_upload = [&](grpc::ServerContext& context, UploadReader& reader, v1::UploadAdapterResponse&) {
    v1::UploadAdapterRequest request;
    while (reader.Read(&request)) {
    }
    if (context.IsCancelled()) gone.Notify();
    return absl::CancelledError("client gone");
  };
  const std::string path = MakeFile(3 << 20);
  const auto response =
      server.Connect()->UploadAdapter("style", path, {.events = {.hashed = [&](uint64_t bytes, uint64_t total) {
                                                        if (bytes == total) fs::resize_file(path, 1 << 20);
                                                      }}});
  EXPECT_EQ(response.status().code(), absl::StatusCode::kAborted) << response.status();
  EXPECT_EQ(ReasonOf(response.status()), "FILE_CHANGED");
  EXPECT_TRUE(gone.WaitForNotificationWithTimeout(absl::Seconds(10)));
}

TEST_F(UploadTest, WhatIsNoReadableFileIsRefusedByName) {
  FakeServer server;
  for (const std::string& path : {(folder_ / "missing").string(), folder_.string()}) {
    const auto response = server.Connect()->UploadAdapter("style", path);
    EXPECT_EQ(response.status().code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(ReasonOf(response.status()), "NO_SUCH_FILE");
    EXPECT_THAT(std::string(response.status().message()), HasSubstr(path));
  }
}

}  // namespace
}  // namespace h3::client
