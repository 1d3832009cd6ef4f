// A picture's file as a message holds it. Pixels stay in this browser until they are sent.

// What the server reads; others are written anew, as far as the browser reads them.
const AS_THEY_ARE = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];
// Every turn sends all pictures of a conversation, and a request has at most 16 MB.
const MOST_BYTES = 1_500_000;
const MOST_PIXELS = 4_194_304; // of one that is written anew; models see fewer by default
const LARGEST = 100_000_000; // bytes of a file

/** {name, image, width, height}, the image as a data: URI; throws an Error for people. */
export async function readPicture(file) {
  const name = file.name.slice(0, 200);
  if (file.size > LARGEST) throw new Error(`${name} is too large: a picture has at most 100 MB.`);
  let bitmap;
  try {
    bitmap = await createImageBitmap(file, { imageOrientation: "from-image" });
  } catch {
    throw new Error(`${name} is no picture that this browser reads. Save it as PNG or JPEG.`);
  }
  try {
    const { width, height } = bitmap;
    if (file.size <= MOST_BYTES && AS_THEY_ARE.includes(file.type)) return { name, image: await dataUri(file), width, height };
    return { name, ...(await writtenAnew(bitmap)) };
  } finally {
    bitmap.close();
  }
}

/** Smaller, as JPEG on white. */
async function writtenAnew(bitmap) {
  const shrink = Math.min(1, Math.sqrt(MOST_PIXELS / (bitmap.width * bitmap.height)));
  const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(shrink * side)));
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, width, height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, width, height);
  return { image: await dataUri(await canvas.convertToBlob({ type: "image/jpeg", quality: 0.9 })), width, height };
}

const dataUri = (blob) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("The picture could not be read."));
    reader.readAsDataURL(blob);
  });
