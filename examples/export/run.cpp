// Runs what export.py has compiled, without Python, and checks it against the call it has kept.
//
//   run FOLDER
//
// The op library registers torch.ops.bitnet.* when it is loaded; AOTInductor's code calls them by
// name. Nothing of bitnet_ops is linked or included.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/script.h>

#include <fstream>
#include <iostream>
#include <string>
#include <vector>

namespace {

std::vector<at::Tensor> numbered(const torch::jit::Module& kept, const std::string& prefix) {
  std::vector<at::Tensor> tensors;
  for (int i = 0; kept.hasattr(prefix + std::to_string(i)); ++i) {
    tensors.push_back(kept.attr(prefix + std::to_string(i)).toTensor());
  }
  return tensors;
}

bool check(const std::string& folder, const std::string& name) {
  torch::inductor::AOTIModelPackageLoader model(folder + "/" + name + ".pt2");
  const auto kept = torch::jit::load(folder + "/" + name + ".pt");
  auto inputs = numbered(kept, "input_");
  const auto outputs = model.run(inputs);
  bool same = outputs.at(0).equal(kept.attr("result").toTensor());
  const auto after = numbered(kept, "after_");
  for (size_t i = 0; i < after.size(); ++i) same = same && inputs[i].equal(after[i]);
  std::cout << name << ": result " << outputs.at(0).sizes()
            << (same ? ", equal to Python's bit for bit\n" : ", DIFFERS from Python's\n");
  return same;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: run FOLDER, which export.py has written\n";
    return 2;
  }
  const std::string folder = argv[1];
  std::string library;
  std::getline(std::ifstream(folder + "/ops_path.txt"), library);
  if (dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    std::cerr << dlerror() << "\n";
    return 1;
  }
  c10::InferenceMode guard;
  const bool linear = check(folder, "linear"), layer = check(folder, "layer");
  return linear && layer ? 0 : 1;
}
